"""A model of the user's own in the working directory."""

import sys

import pytest
from safetensors.torch import save_file

MODULE = """\
import advnorm
def build():
    return advnorm.create_model("small_cnn", in_channels=1)
def dual():
    return advnorm.create_model("small_cnn", in_channels=1, norm="dual_bn")
def broken():
    {}["missing"]
def leaving():
    raise SystemExit(3)
def number():
    return 3
def empty():
    return build().to("meta")
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch, sound):
    """The folder of ``own_model.py``, a module with model builders, and of the weights ``w.safetensors``."""
    (tmp_path / "own_model.py").write_text(MODULE)
    save_file(sound.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_model", None)
