"""Protocols of papers: the authors' code, and Imagenette instead of ImageNet."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import advnorm
from advnorm.config import Named
from advnorm.data import ImageData
from advnorm.data.loader import make_loader
from advnorm.norms import mixture_likelihood, mixture_norms
from advnorm.studies import STUDIES
from advnorm.studies.protocols import plan_cell, smoke, with_search, without_search
from advnorm.studies.record import matches_cell
from advnorm.studies.run_tasks import run_task
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task
from advnorm.training import train
from support.command import invoke
from support.problems import raises_problem
from support.study_records import make_task, state_of, write_record

E_CELLS = {
    (name, cell.name): plan_cell(cell, "imagenette")
    for name in STUDIES.names("E/*")
    for cell in STUDIES.get(name).cells()
}


@pytest.mark.parametrize("eps", [8, 16])
def test_the_authors_of_a_start_beside_the_image_and_evaluate_with_a_quarter_of_eps(eps):
    cell = STUDIES.get("A/table3").cell(f"dual_bn/eps{eps}")
    planned = plan_cell(cell, "authors")
    assert (planned.config.attack.start, planned.config.attack.step_size) == ("gaussian", "2/255")
    assert replace(planned.config, attack=cell.config.attack) == cell.config
    some, every = (measure.options for measure in planned.measures)
    assert (some["attacks"], some["limit"]) == ({"autoattack": "autoattack"}, 1000)
    assert every["attacks"] == {"pgd10": f"pgd10-step{eps // 4}"} and "limit" not in every
    assert some["route"] == every["route"] == ["clean", "adv"]


def test_the_authors_of_c_have_another_network_crop_selection_norm_and_likelihood():
    def planned(study, cell):
        return plan_cell(STUDIES.get(study).cell(cell), "authors").config

    plain = planned("C/table4", "cifar10/eps16/mat_cat_0.5_dbn")
    assert (plain.model, plain.augment, plain.validate_every) == (Named("preact_resnet18"), "crop_flip_edge", 2)
    assert plain.objective.options["likelihood_weight"] == 1e-3
    assert plain.objective.options["likelihood_positions"] == "mean"
    for cell in ("cifar10/eps16/mat_cat_0.5_dbn", "imagenette/eps16/trades_cat_6_dbn"):
        config = planned("C/table4", cell)
        model = advnorm.create_model(config.model.name, num_classes=10, norm=dict(config.norm), width=0.125)
        stages = [name.split(".")[0] for name in mixture_norms(model)]
        assert stages == ["layer1", "layer2", "layer3", "layer4"]
        for name in mixture_norms(model):
            blocks = getattr(model, name.split(".")[0])
            assert name.endswith(f".{len(blocks) - 1}.bn2")
    assert planned("C/table2", "cifar10/eps16/mat_cat_0.5/in").norm_options == {"affine": False}
    assert planned("C/table1", "imagenette/eps16/mat_cat_0.5").lr == 0.01


def test_a_larger_batch_than_that_of_the_fast_protocol_stays():
    cell = STUDIES.get("A/table3").cell("single/eps16")
    large = replace(cell, config=replace(cell.config, batch_size=1024))
    planned = plan_cell(large, "fast").config
    assert (planned.batch_size, planned.lr) == (1024, cell.config.lr)


def test_the_groups_of_a_second_pass_keep_their_size_in_larger_batches():
    cell = STUDIES.get("B/table3").cell("apart/N128/eps0.1/n8")
    planned = plan_cell(cell, "fast")
    before, after = (one.config.second_pass.options["groups"] for one in (cell, planned))
    assert before == 8 and cell.config.batch_size / before == planned.config.batch_size / after == 16


@pytest.mark.parametrize(
    ("study", "cell", "protocol"),
    [
        ("C/table4", "cifar10/eps16/mat_cat_0.5_dbn", "authors"),
        ("C/table2", "cifar10/eps16/mat_cat_0.5/in", "authors"),
        ("A/table2", "cross_bn/eps16", "authors"),
        ("E/table2", "mbn_hybrid/pgd30/running", "imagenette"),
        ("E/fig7", "clean", "imagenette"),
        ("D/table1", "imagenet/vgg16/none", "imagenette"),
    ],
)
def test_a_training_of_another_protocol_runs(study, cell, protocol, tmp_path):
    planned = smoke(plan_cell(STUDIES.get(study).cell(cell), protocol))
    augment = plan_cell(STUDIES.get(study).cell(cell), protocol).config.augment
    assert train(replace(planned.config, augment=augment), out=tmp_path, device="cpu").finished


def test_every_cell_of_paper_e_fits_the_stand_in():
    for planned in E_CELLS.values():
        config = planned.config
        assert config.data == Named("imagenette", image_size=128, resize=128) and config.epochs <= 15
        assert config.batch_size <= 512 and config.schedule == "one_cycle"
        assert all(one.options["limit"] == 200 for one in planned.measures if one.name == "benchmark")
    by_depth = [
        E_CELLS["E/fig7", f"adv/pgd30/running{end}"].config.model.name for end in ("", "/resnet200", "/resnet638")
    ]
    assert by_depth == [f"imagenet_resnet{depth}" for depth in (18, 34, 152)]
    assert E_CELLS["E/table4", "adv/pgd5"].config.attack.steps == 5
    assert E_CELLS["E/table2", "adv/pgd30/running"].config.running_epochs == 1
    assert E_CELLS["E/table6", "adv/pgd30/running/batch512"].config.batch_size == 32


def test_pgd_of_paper_e_searches_in_bf16_on_the_stand_in_and_in_float32_if_strict(tmp_path):
    task = make_task(tmp_path, "adv/pgd30", study="E/fig2", protocol="imagenette")
    for strict, end in ((False, "-bf16"), (True, "")):
        planned = replace(task, strict_search=strict).planned_cell
        assert planned.measures[-1].options["attacks"] == {"pgd2000": f"pgd2000-step1-targeted{end}"}
    assert with_search({"attacks": {"a": "pgd10-step2-worst", "b": "noise-uniform"}}, "bf16", "pgd") == {
        "attacks": {"a": "pgd10-step2-worst-bf16", "b": "noise-uniform"}
    }
    assert with_search({"attacks": {"a": "autoattack-tf32"}}, "float32", "autoattack") == {
        "attacks": {"a": "autoattack-float32"}
    }
    assert without_search({"attacks": {"a": "pgd5-bf16-worst", "b": "autoattack-tf32"}, "limit": 3}) == {
        "attacks": {"a": "pgd5-worst", "b": "autoattack-tf32"},
        "limit": 3,
    }


def test_other_cells_of_a_stand_in_are_shortened_as_usual():
    cell = STUDIES.get("D/table1").cell("cifar10/vgg16/bn")
    assert plan_cell(cell, "imagenette").config == plan_cell(cell, "fast").config


def test_a_strict_search_is_recorded_and_serves_the_same_cell(tmp_path):
    fast = make_task(tmp_path, "single/eps16", protocol="paper")
    strict = replace(fast, strict_search=True)
    names = [task.planned_cell.measures[0].options["attacks"]["autoattack"] for task in (fast, strict)]
    assert names == ["autoattack", "autoattack-float32"]
    write_record(strict, {"shared/clean": 90.0, "shared/pgd10": 30.0, "shared/autoattack": 1.0})
    assert state_of(fast) == "done"
    record = RecordStore(tmp_path).read(fast.record_name)
    assert matches_cell(record, STUDIES.get("A/table2").cell("single/eps16"))
    other = json.loads(json.dumps([asdict(one) for one in fast.planned_cell.measures]))
    other[0]["options"]["attacks"]["autoattack"] = "pgd5"
    assert not matches_cell({**record, "measures": other}, STUDIES.get("A/table2").cell("single/eps16"))


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        (("A/table3", "--stand-in", "imagenette"), "not_supported", "stand_in"),
        (("E/fig1", "--stand-in", "cifar10"), "unknown_name", "stand-in"),
        (("E/fig1", "--stand-in", "imagenette", "--protocol", "fast"), "conflict", "stand_in"),
        (("E/fig1", "--protocol", "authors"), "unknown_name", "protocol"),
    ],
)
def test_a_protocol_that_a_paper_does_not_have_is_rejected(options, code, field):
    with raises_problem(code, field):
        invoke("study", *options, "--dry-run")


def test_a_dry_run_of_the_stand_in_shows_its_cost(tmp_path):
    out = invoke("study", "E/fig1", "--stand-in", "imagenette", "--dry-run", "--out", tmp_path).output
    assert "imagenette" in out and "pending: 6 training(s)" in out and "unknown size" not in out


# -- what the protocols need -------------------------------------------------------------------------------------------


def test_a_crop_beyond_the_border_repeats_the_border():
    images = torch.arange(16 * 16, dtype=torch.uint8).reshape(1, 1, 16, 16)
    data = ImageData(images=images, labels=torch.zeros(1, dtype=torch.long), num_classes=2, name="grey", split="train")
    crops = {
        tuple(batch.x[0, 0].mul(255).round().byte().flatten().tolist())
        for seed in range(40)
        for batch in make_loader(data, batch_size=1, seed=seed, augment="crop_flip_edge", device="cpu").epoch(0)
    }
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="replicate")[0, 0].byte()
    expected = set()
    for down in range(5):
        for right in range(5):
            crop = padded[down : down + 16, right : right + 16]
            expected |= {tuple(crop.flatten().tolist()), tuple(crop.flip(1).flatten().tolist())}
    assert len(crops) > 10 and crops <= expected


def test_the_likelihood_may_be_a_mean_over_positions():
    model = advnorm.create_model("small_cnn", num_classes=10, norm="gmm_bn", in_channels=1, normalize=False)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with advnorm.route(model, {"clean": 4, "adv": 4}), mixture_likelihood(model) as likelihood:
        model(x)
    terms = likelihood._terms
    assert likelihood.loss().item() == pytest.approx(sum(term.sum(1).mean().item() for term in terms))
    assert likelihood.loss("mean").item() == pytest.approx(sum(term.mean().item() for term in terms))
    assert len({term.shape[1] for term in terms}) > 1  # layers of other sizes have other numbers of positions


def test_the_record_of_a_cell_has_a_bit_for_each_image_and_attack(tmp_path):
    task = Task(study="A/table1", cell="dual_bn/eps16", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    record = run_task(task)
    (part,) = record["outcomes"]
    branches = [f"{branch}/{name}" for branch in ("clean", "adv") for name in ("clean", "pgd10", "autoattack")]
    assert sorted(part["bits"]) == sorted(branches) and part["rows"] == [0, 4, 8, 12]
    stored = json.loads(task.record_path.read_text())
    assert stored["outcomes"] == record["outcomes"] and stored["digest"]
    stored["values"]["adv/clean"] = 99.0
    task.record_path.write_text(json.dumps(stored))
    assert state_of(task) == "damaged"  # an edit is noticed
