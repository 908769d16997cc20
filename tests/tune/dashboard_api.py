"""What Optuna Dashboard's own web application answers about a study, without a server."""

from __future__ import annotations

import io
import json
from typing import Any

import optuna
import optuna_dashboard


def study_detail(url: str) -> dict[str, Any]:
    """The JSON that the dashboard's study page is drawn from."""
    answer: list[str] = []
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies/1", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO()}
    application = optuna_dashboard.wsgi(optuna.storages.RDBStorage(url))
    body = b"".join(application(request, lambda status, headers, exc=None: answer.append(status)))
    assert answer == ["200 OK"], (answer, body)
    detail: dict[str, Any] = json.loads(body)
    return detail
