"""Loading a workload: three path forms, objects, and errors that name what is wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.bench.batch import batch_length, equal_batches
from autoprec.bench.workload import default_loss, load_workload
from autoprec.errors import WorkloadError

MODEL = """
import torch
from torch import nn

BATCH_SIZE = 16
GRAD_CLIP = 1.0

def build_model():
    return nn.Linear(4, 3)

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(sys, "path", [*sys.path])

    def file(text: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return file


def _error(reference: Any) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        load_workload(reference)
    assert caught.value.hint, "an error says what to do next"
    return caught.value


def test_a_file_loads(write: Write) -> None:
    path = write(MODEL)
    for reference in (path, str(path)):
        workload = load_workload(reference)
        assert (workload.name, workload.reference) == ("model", str(path))
        assert (workload.batch_size, workload.grad_clip, workload.batch_size_given) == (16, 1.0, True)
        x, y = next(workload.batches(16, 0))
        assert workload.loss(workload.build_model(), (x, y)).item() > 0


def test_an_object_in_a_file_loads_by_its_name(write: Write) -> None:
    body = MODEL.replace("\ndef ", "\n    def ").replace("\n    return", "\n        return")
    path = write(MODEL + "\nclass Small:\n    BATCH_SIZE = 4\n    build_model = staticmethod(build_model)\n"
                 "    batches = staticmethod(batches)\n\nother = Small()\n")  # fmt: skip
    assert body
    for name in ("Small", "other"):
        workload = load_workload(f"{path}:{name}")
        assert workload.batch_size == 4
        assert workload.reference == f"{path}:{name}"
        assert load_workload(workload.reference).sha256 == workload.sha256


def test_an_object_in_a_module_loads_by_its_dotted_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(MODEL + "\nfrom types import SimpleNamespace\n"
                                     "tiny = SimpleNamespace(build_model=build_model, batches=batches)\n")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    workload = load_workload("zoo.nets:tiny")
    assert (workload.name, workload.reference, workload.batch_size) == ("tiny", "zoo.nets:tiny", 128)
    assert load_workload("zoo.nets").batch_size == 16


def test_an_object_in_memory_loads_and_has_no_reference() -> None:
    stand = SimpleNamespace(build_model=lambda: nn.Linear(2, 2), batches=lambda n, seed: iter([]))
    workload = load_workload(stand)
    assert workload.reference == ""
    assert workload.batch_size_given is False
    assert load_workload(workload) is workload


def test_methods_of_a_class_get_an_instance() -> None:
    class Stand:
        BATCH_SIZE = 2

        def __init__(self) -> None:
            self.width = 3

        def build_model(self) -> nn.Module:
            return nn.Linear(self.width, 1)

        def batches(self, batch_size: int, seed: int) -> Any:
            return iter([torch.zeros(batch_size, self.width)])

    assert load_workload(Stand).build_model().in_features == 3


def test_a_model_file_may_import_what_lies_beside_it_and_its_hash_follows(write: Write) -> None:
    helper = write("WIDTH = 4\n", "widths_beside.py")
    path = write("from widths_beside import WIDTH\n" + MODEL)
    first = load_workload(path).sha256
    assert load_workload(path).sha256 == first
    helper.write_text("WIDTH = 5\n")
    changed = load_workload(path).sha256
    assert changed != first
    path.write_text(path.read_text().replace("BATCH_SIZE = 16", "BATCH_SIZE = 32"))
    assert load_workload(path).sha256 not in (first, changed)


def test_a_missing_file_names_the_near_one(write: Write, tmp_path: Path) -> None:
    write(MODEL, "model.py")
    error = _error(str(tmp_path / "modle.py"))
    assert "No model file at" in error.message
    assert "Did you mean 'model.py'?" in error.message
    assert "path/model.py:object" in error.hint
    assert "Did you mean 'model.py'?" in _error(str(tmp_path / "model")).message


def test_a_folder_is_no_model_file(write: Write, tmp_path: Path) -> None:
    write(MODEL)
    error = _error(str(tmp_path))
    assert "is a folder" in error.message
    assert "model.py" in error.hint


def test_a_syntax_error_shows_its_line(write: Write) -> None:
    error = _error(write("def build_model(:\n    pass\n"))
    assert "model.py has a syntax error in line 1" in error.message
    assert "def build_model(:" in error.message
    assert "^" in error.message


def test_a_missing_package_is_named_with_the_line_that_wants_it(write: Write) -> None:
    error = _error(write("x = 1\nimport no_such_package_here\n"))
    assert "imports 'no_such_package_here', which is not installed" in error.message
    assert "model.py, line 2" in error.message


def test_an_error_while_loading_shows_the_users_line(write: Write) -> None:
    error = _error(write("def f():\n    return {}['key']\n\nf()\n"))
    assert "model.py raised KeyError: 'key' while it was loaded" in error.message
    assert "line 2, in f: return {}['key']" in error.message


def test_a_file_that_exits_says_so(write: Write) -> None:
    error = _error(write("import sys\nsys.exit(3)\n"))
    assert "ended the program while it was loaded (exit code 3)" in error.message
    assert "__main__" in error.hint


def test_a_misspelt_build_model_is_recognised(write: Write) -> None:
    error = _error(write(MODEL.replace("def build_model", "def build_modle")))
    assert "build_modle" in error.message
    assert "Did you mean 'build_model'?" in error.message


@pytest.mark.parametrize(
    ("text", "slip", "meant"),
    [
        ("def build_optimiser(model): ...", "build_optimiser", "build_optimizer"),
        ("BATCHSIZE = 3", "BATCHSIZE", "BATCH_SIZE"),
        ("GRADCLIP = 1.0", "GRADCLIP", "GRAD_CLIP"),
        ("def collatte(samples): ...", "collatte", "collate"),
    ],
)
def test_a_slip_in_an_optional_name_is_not_silently_ignored(write: Write, text: str, slip: str, meant: str) -> None:
    base = MODEL.replace("BATCH_SIZE = 16\n", "").replace("GRAD_CLIP = 1.0\n", "")
    error = _error(write(base + "\n" + text + "\n"))
    assert f"'{slip}' is not a name autoprec knows. Did you mean '{meant}'?" in error.message


def test_ordinary_helpers_are_no_slips(write: Write) -> None:
    extra = "\nfrom torch.utils import data as datasets\nLOSSES = 3\ndef losses(): ...\ndef make_batch(): ...\nSEED = 1\n"
    assert load_workload(write(MODEL + extra)).batch_size == 16


def test_neither_batches_nor_dataset_is_an_error(write: Write) -> None:
    error = _error(write("from torch import nn\ndef build_model():\n    return nn.Linear(1, 1)\n"))
    assert "has no batches(batch_size, seed) and no dataset()" in error.message
    assert "either batches(batch_size, seed) or dataset()" in error.hint


def test_a_missing_object_names_the_near_one(write: Write) -> None:
    error = _error(f"{write(MODEL)}:build_modell")
    assert "has no 'build_modell'. Did you mean 'build_model'?" in error.message


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "'big'", "True"])
def test_a_batch_size_must_be_a_whole_number(write: Write, value: str) -> None:
    assert "BATCH_SIZE is" in _error(write(MODEL.replace("BATCH_SIZE = 16", f"BATCH_SIZE = {value}"))).message


@pytest.mark.parametrize("value", ["0", "-1.0", "'x'", "float('nan')"])
def test_a_clip_must_be_a_number_over_zero(write: Write, value: str) -> None:
    assert "GRAD_CLIP is" in _error(write(MODEL.replace("GRAD_CLIP = 1.0", f"GRAD_CLIP = {value}"))).message


def test_a_value_in_place_of_a_function_is_refused(write: Write) -> None:
    error = _error(write(MODEL + "\nbatches = [1, 2]\n"))
    assert "batches is a list; it must be a function" in error.message


def test_an_unknown_module_is_refused() -> None:
    assert "No module named 'no_such_module_here'" in _error("no_such_module_here:x").message
    assert "neither a file nor the name" in _error("what is this?").message


def test_a_file_that_tunes_itself_without_a_guard_is_told_so(write: Write) -> None:
    path = write(MODEL + "\nfrom autoprec.bench.workload import load_workload\nload_workload(__file__)\n")
    error = _error(path)
    assert "starts autoprec on itself" in error.message
    assert "__main__" in error.hint


def test_a_dataset_becomes_an_endless_reproducible_shuffled_stream(write: Write) -> None:
    path = write(
        """
        import random
        import torch
        from torch import nn
        BATCH_SIZE = 4
        def build_model(): return nn.Linear(2, 2)
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 10
            def __getitem__(self, index):
                return torch.tensor([float(index), random.random()]) + 0.001 * torch.rand(2), index
        def dataset(): return Data()
        """
    )
    workload = load_workload(path)
    assert workload.num_samples is not None
    assert workload.num_samples() == 10
    before = torch.get_rng_state()
    first = list(itertools.islice(workload.batches(4, 0), 7))
    torch.rand(3)
    again = list(itertools.islice(workload.batches(4, 0), 7))
    assert not torch.equal(torch.get_rng_state(), before)
    assert all(equal_batches(a, b) for a, b in zip(first, again, strict=True))
    assert [batch_length(batch) for batch in first] == [4] * 7
    assert first[0][1].tolist() != sorted(first[0][1].tolist()) or first[1][1].tolist() != sorted(first[1][1].tolist())
    assert not equal_batches(first[0], next(workload.batches(4, 1)))


def test_drawing_from_a_dataset_leaves_the_random_state_alone() -> None:
    class Noise(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(2)

    workload = load_workload(SimpleNamespace(build_model=lambda: nn.Linear(2, 1), dataset=Noise, BATCH_SIZE=4))
    before = torch.get_rng_state()
    next(workload.batches(4, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_smaller_than_the_batch_says_how_many_it_has() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(5, 2))
    workload = load_workload(SimpleNamespace(build_model=lambda: nn.Linear(2, 1), dataset=lambda: data, BATCH_SIZE=8))
    with pytest.raises(WorkloadError, match="dataset\\(\\) has 5 samples, fewer than one batch of 8") as error:
        next(workload.batches(8, 0))
    assert "BATCH_SIZE = 5 or less" in error.value.hint


def test_a_collate_function_is_used() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    stand = SimpleNamespace(
        build_model=lambda: nn.Linear(1, 1),
        dataset=lambda: data,
        collate=lambda samples: {"n": torch.stack([s[0] for s in samples])},
    )
    assert set(next(load_workload(stand).batches(4, 0))) == {"n"}


def test_a_loader_starts_over_and_its_short_last_batch_is_left_out() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    stand = SimpleNamespace(
        build_model=lambda: nn.Linear(1, 1), batches=lambda n, seed: torch.utils.data.DataLoader(data, batch_size=n)
    )
    lengths = [batch_length(batch) for batch in itertools.islice(load_workload(stand).batches(4, 0), 5)]
    assert lengths == [4] * 5


def test_the_default_loss_takes_pairs_and_dicts() -> None:
    model = nn.Linear(2, 3)
    assert default_loss(model, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))).dim() == 0

    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(loss=x.sum())

    assert default_loss(Wrapped(), {"x": torch.ones(3)}).item() == 3.0
    for batch in ((torch.zeros(1),) * 3, torch.zeros(2)):
        with pytest.raises(WorkloadError, match="the default does not fit a batch of type"):
            default_loss(model, batch)
    with pytest.raises(WorkloadError, match="without a loss"):
        default_loss(nn.Identity(), {"input": torch.ones(3)})


def test_the_default_optimizer_is_adamw_over_trainable_parameters() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    workload = load_workload(SimpleNamespace(build_model=lambda: model, batches=lambda n, seed: iter([])))
    optimizer = workload.build_optimizer(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model.weight)]
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_dataclasses_and_pickling_work_in_a_model_file(write: Write) -> None:
    path = write(MODEL + "\nfrom dataclasses import dataclass\n@dataclass\nclass Pair:\n    x: 'int'\n")
    code = f"import pickle; from autoprec.bench.workload import load_workload as l; w = l({str(path)!r});" \
           "pickle.dumps(w.build_model)"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr
