"""Principal components against scikit-learn, up to the sign of each."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

import advnorm
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, projection
from advnorm.analysis.projection import principal_components
from support.problems import raises_problem


def same_up_to_sign(found, expected, tolerance):
    for mine, theirs in zip(found.T, expected.T):
        size = np.abs(theirs).max()
        assert min(np.abs(mine - theirs).max(), np.abs(mine + theirs).max()) <= tolerance * size


@settings(deadline=None, max_examples=25, derandomize=True)
@given(rows=st.integers(5, 30), columns=st.integers(3, 60), offset=st.sampled_from([0, 100]), seed=st.integers(0, 99))
def test_components_from_inner_products_are_those_of_scikit_learn(rows, columns, offset, seed):
    rng = np.random.default_rng(seed)
    data = rng.normal(size=(rows, columns)) * 2.0 ** -np.arange(columns) + offset  # well separated variances
    scores, shares = principal_components(torch.tensor(data @ data.T))
    pca = PCA(2, svd_solver="full").fit(data)
    same_up_to_sign(scores.numpy(), pca.transform(data), 1e-5)
    np.testing.assert_allclose(shares, pca.explained_variance_ratio_, atol=1e-7)
    assert (scores.gather(0, scores.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "none"])
def test_a_network_s_layers_are_projected_as_by_scikit_learn(digits, untouched, norm):
    model = digits.networks[norm]
    route = "adv" if norm == "dual_bn" else None
    inputs = {"clean": digits.x, "adv": (digits.x + 0.3).clamp(0, 1), "autoattack": digits.x.flip(3)}
    with untouched(model):
        found = projection(model, inputs, samples=90, route=route, batch_size=40)
    assert list(found.layers) == ["bn1", "bn2", "bn3"]
    kept = {}
    hooks = [
        model.get_submodule(layer).register_forward_pre_hook(
            lambda _, args, layer=layer: kept.__setitem__(layer, args[0].double().flatten(1).numpy())
        )
        for layer in found.layers
    ]
    with advnorm.route(model, "adv"), torch.no_grad():
        model(torch.cat([images[:90] for images in inputs.values()]))
    for hook in hooks:
        hook.remove()
    for layer, (explained, points) in found.layers.items():
        assert {name: tuple(rows.shape) for name, rows in points.items()} == dict.fromkeys(inputs, (90, 2))
        pca = PCA(2, svd_solver="full").fit(kept[layer])
        same_up_to_sign(torch.cat(list(points.values())).numpy(), pca.transform(kept[layer]), 1e-4)
        assert explained == pytest.approx(tuple(pca.explained_variance_ratio_), rel=1e-4)


def test_at_most_two_batches_are_in_memory_and_the_batch_size_does_not_matter(digits):
    model = digits.networks["bn"]
    rows = []
    handle = model.bn2.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    small = projection(model, {"clean": digits.x}, layers="bn2", samples=100, batch_size=30)
    handle.remove()
    assert set(rows) == {25} and len(rows) == 10  # a forward for each pair of the 4 batches
    large = projection(model, {"clean": digits.x}, layers="bn2", samples=100, batch_size=100)
    torch.testing.assert_close(
        small.layers["bn2"].points["clean"], large.layers["bn2"].points["clean"], rtol=1e-4, atol=1e-4
    )


def test_a_projection_of_a_run_is_drawn_and_saved(digits, untouched, tmp_path):
    target = digits.target("dual_bn")
    with untouched(target.model):
        found = ANALYSES.get("projection").run(
            target, inputs=["clean", "adv", "autoattack-steps2-queries3"], samples=50
        )
    figure = found.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"Input of bn{n}" for n in (1, 2, 3)]
    assert all(len(axes.collections) == 3 for axes in figure.axes)
    assert all(len(points.get_offsets()) == 50 for axes in figure.axes for points in axes.collections)
    assert figure.axes[0].get_xlabel() == f"component 1 ({found.layers['bn1'].explained_variance_ratio[0]:.0%})"
    assert len(figure.legends[0].get_texts()) == 3
    paths = found.save(tmp_path / "projection")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"]
    assert json.loads(paths[0].read_text()) == with_digest(found.record())


def test_a_wrong_layer_or_number_of_samples_raises(digits):
    with raises_problem("unknown_name", "layer"):
        projection(digits.networks["bn"], {"clean": digits.x}, layers=["bn33"])
    with raises_problem("out_of_range", "samples"):
        projection(digits.networks["bn"], {"clean": digits.x}, samples=1)


@pytest.mark.parametrize("samples", [0, 1, True, 2.5])
def test_too_few_samples_raise_before_any_attack(digits, monkeypatch, samples):
    monkeypatch.setattr("advnorm.analysis.images.craft_inputs", lambda *_, **__: pytest.fail("an attack started"))
    with raises_problem("out_of_range" if samples in (0, 1) and samples is not True else "wrong_type", "samples"):
        ANALYSES.get("projection").run(digits.target("bn"), samples=samples)


def test_a_projection_records_its_number_of_images_and_checks_the_batch_size(digits):
    found = projection(digits.networks["bn"], {"clean": digits.x[:9], "other": digits.x[:7]}, samples=500)
    assert found.conditions["samples"] == {"clean": 9, "other": 7}
    with raises_problem("out_of_range", "batch_size"):
        projection(digits.networks["bn"], {"clean": digits.x}, batch_size=0)
