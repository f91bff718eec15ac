"""Names, splits, options and folders of the registered data sets."""

import pytest

from advnorm import ConfigError
from advnorm.data import DATASETS, data_problems, list_datasets, load
from support.problems import raises_problem


def test_names_splits_options_and_folders_are_checked_at_once():
    assert list_datasets("cifar10*") == ["cifar10", "cifar100", "cifar10c"] and set(list_datasets()) == set(DATASETS)
    with pytest.raises(ConfigError):
        load("cifar-10", "train")
    with pytest.raises(ConfigError) as error:
        load("cifar10c", "train", severty=3)
    found = [(problem.code, problem.field) for problem in error.value.problems]
    assert found == [
        ("unknown_name", "severty"),
        ("missing_option", "corruption"),
        ("missing_option", "severity"),
        ("unknown_name", "split"),
        ("missing_folder", "root"),
    ]
    assert list(error.value.problems) == data_problems("cifar10c", "train", severty=3)
    with raises_problem("not_supported", "download"):
        load("imagefolder", "train", "here", download=True)


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "given"])
def test_an_empty_folder_raises_with_a_hint(name, tmp_path):
    source = DATASETS.get(name)
    if not source.needs_root:
        assert len(load(name, source.splits[0], tmp_path)) > 0 and not data_problems(name, source.splits[0])
        return
    options = {"corruption": "fog", "severity": 1} if name == "cifar10c" else {}
    for split in source.splits:
        with raises_problem("missing_file", "root") as caught:
            load(name, split, tmp_path, **options)
        assert caught.value.problems[0].hint
        assert list(caught.value.problems) == data_problems(name, split, tmp_path, **options)
