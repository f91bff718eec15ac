"""Repositories of the Hugging Face Hub, as far as they exist without a network: the cache, and errors."""

import shutil
import subprocess
import sys

import pytest

import advnorm
from advnorm._core.records import model_fingerprint
from support.command import invoke
from support.problems import raises_problem


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and an own cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_repository_is_read_from_the_cache(offline, tmp_path):
    model = advnorm.create_model("small_cnn", norm="dual_bn")
    advnorm.save_pretrained(model, tmp_path / "saved")
    folder, commit = offline / "models--someone--mine", "0" * 40
    shutil.copytree(tmp_path / "saved", folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert model_fingerprint(advnorm.from_pretrained("someone/mine")) == model_fingerprint(model)
    weights = folder / "snapshots" / commit / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    with raises_problem("wrong_digest", "model.safetensors"):
        advnorm.from_pretrained("someone/mine")


@pytest.mark.parametrize("source", ["someone/else", "no folder", "a/b/c", ""])
def test_what_is_neither_a_folder_nor_a_repository_is_one_error(offline, source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with raises_problem("missing_file" if source == "" else "download_failed"):
        advnorm.from_pretrained(source)


def test_a_push_verifies_the_folder_before_it_connects(offline, tmp_path):
    saved = advnorm.save_pretrained(advnorm.create_model("small_cnn"), tmp_path / "saved")
    with raises_problem("upload_failed", "repo"):
        invoke("push", saved, "someone/mine")
    (saved / "model.safetensors").write_bytes(b"")
    with raises_problem("wrong_digest", "model.safetensors"):
        invoke("push", saved, "someone/mine")


def test_without_the_package_the_error_names_the_extra(tmp_path):
    saved = advnorm.save_pretrained(advnorm.create_model("small_cnn"), tmp_path / "saved")
    program = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import advnorm\n"
        f"advnorm.from_pretrained({str(saved)!r})\n"
        f"for act in (lambda: advnorm.sharing.push({str(saved)!r}, 'a/b'), lambda: advnorm.from_pretrained('a/b')):\n"
        "    try: act(); sys.exit(1)\n"
        "    except advnorm.ConfigError as error: assert error.code == 'missing_package', error\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
