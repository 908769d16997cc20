from __future__ import annotations

import pickle

import pytest

from autoprec import errors
from autoprec.errors import AutoprecError, UserError, suggest

EVERY = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, AutoprecError)]


@pytest.mark.parametrize("kind", EVERY)
def test_an_error_survives_pickling_with_message_hint_and_kind(kind):
    error = kind("batch size is 0; allowed is 1 or more", hint="Give --batch 8.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.message, again.hint, again.exit_code) == (error.message, error.hint, error.exit_code)
    assert str(again) == "batch size is 0; allowed is 1 or more\n  Give --batch 8."


def test_a_users_mistake_exits_with_2_and_any_other_error_with_1():
    codes = {kind.__name__: kind.exit_code for kind in EVERY}
    assert codes.pop("AutoprecError") == codes.pop("WorkerError") == 1
    assert set(codes.values()) == {2}
    assert all(issubclass(kind, UserError) == (kind.exit_code == 2) for kind in EVERY)


def test_an_error_without_a_hint_is_its_message_alone():
    assert str(UserError("No such file.")) == "No such file."


def test_suggest_names_the_nearest_word_or_nothing():
    assert suggest("defualt", ["default", "layers"]) == " Did you mean 'default'?"
    assert suggest("xyz", ["default", "layers"]) == ""
    assert suggest("anything", []) == ""
