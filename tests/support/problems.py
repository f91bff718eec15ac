"""Assert errors by the code and field of their problems, never by their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from advnorm import AdvnormError


@contextmanager
def raises_problem(
    code: str, field: str | None = None, kind: type[AdvnormError] = AdvnormError
) -> Iterator[pytest.ExceptionInfo[AdvnormError]]:
    """Scope: an advnorm error is raised that contains a problem with this code and, if given, this field."""
    with pytest.raises(kind) as caught:
        yield caught
    found = [(problem.code, problem.field) for problem in caught.value.problems]
    assert any(c == code and (field is None or f == field) for c, f in found), f"no {(code, field)} in {found}"
