"""Values that support the claim of each study: the paper's numbers, corrected where they fail it, or invented ones."""

import itertools

from advnorm.papers.c import figures as figures_c
from advnorm.papers.c import tables as tables_c
from advnorm.papers.c.trainings import LARGE_EPS as LARGE
from advnorm.papers.c.trainings import SETTINGS
from advnorm.papers.d import figures, tables, trainings
from advnorm.studies import STUDIES

#: What print would have to be to support the claim.
CORRECTIONS = {
    "A/table4": {
        ("dual_affine_ln/eps16", path): value
        for path, value in {"adv/pgd10": 30.0, "adv/autoattack": 22.0, "clean/clean": 93.0}.items()
    },
    "A/table7": {("dual_linear/eps16", "adv/autoattack"): 21.0},
    "B/table1": {("preact_resnet18/cifar100/apart_sam_mixup/2x", "shared/clean"): 79.9},
    "B/table3": {("apart/N128/eps0.4/n8", "shared/clean"): 77.0},
    "E/table1": {("mbn_alp/pgd30", "adv/pgd2000"): 37.0},
}


def supporting(name):
    """Values over seeds by cell and name that support the claim of a study."""
    if name in INVENTED:
        return INVENTED[name]()
    return dict(STUDIES.get(name).printed_values) | {key: [value] for key, value in corrections(name).items()}


def corrections(name):
    if name == "A/table5":  # the control is as robust as the re-calibration
        printed = STUDIES.get(name).printed_values
        pairs = {
            (cell, path): value for (cell, path), [value] in printed.items() if path.startswith(("rows/4", "rows/5"))
        }
        return {(cell, f"rows/{int(path[5]) + 2}{path[6:]}"): value for (cell, path), value in pairs.items()}
    if name == "C/table4":  # DBN adds half a point everywhere
        printed = STUDIES.get(name).printed_values
        pairs = {(f"{s}/{b}", f"{s}/{a}") for s in SETTINGS for b, a in tables_c._WITH_DBN.items()}
        metrics = [f"shared/{metric}" for metric in ("clean", "pgd10", "autoattack")]
        return {(after, m): printed[before, m][0] + 0.5 for before, after in pairs for m in metrics}
    if name == "E/table3":  # no change but the last matters
        cells = [cell.name for cell in STUDIES.get(name).cells()]
        return {(cell, "shared/pgd2000"): 3.0 + 20 * (cell == cells[-1]) for cell in cells}
    return CORRECTIONS.get(name, {})


# -- paper A -----------------------------------------------------------------------------------------------------------

DUAL, STANDARD = "dual_bn/eps16", "standard/eps16"
CHANNELS = {
    (DUAL, f"{series}/{channel}"): values
    for channel in range(3)
    for series, values in {
        "statistics/NS^adv_clean/mean": [0.0, 0.0],
        "statistics/NS^adv_adv/mean": [0.1, -0.1],
        "statistics/NS^clean_clean/mean": [2.0, -2.0],
        "statistics/NS^clean_adv/mean": [2.1, -2.1],
        "affine/AP_clean/weight": [1.0, 1.0],
        "affine/AP_adv/weight": [1.2, 0.8],
    }.items()
}
LAYERS = {
    (DUAL, f"relative_layers/{kind}/{layer}/total"): values
    for layer in ("bn1", "layer1.0.bn2")
    for kind, values in {"AP": [0.5, 0.7], "NS under adv": [0.001, 0.002]}.items()
}
CURVES = {
    (f"{name}/eps16", f"{epoch}/held_out/{metric}"): [value + up]
    for name, values in {"classical": (0.15, 0.30), "cross_at": (0.05, 0.32)}.items()
    for epoch, value in zip((9, 10), values)
    for metric, up in (("pgd10-step2", 0.0), ("clean", 0.3))
}
GAPS = {
    (STANDARD, f"layers/clean-{name}/{layer}/total"): [value]
    for layer in ("bn1", "layer1.0.bn2")
    for name, value in (("adv", 6.0), ("noise", 2.0))  # squared: a factor of 1.7
}


# -- paper B: each of two seeds has a run of another name, which is part of the path in the record ---------------------


def fig1_values(**changed):
    curves = {"uniform random": (0.99, 0.98, 0.97), "binary random": (0.99, 0.97, 0.6)}
    for place, groups in enumerate((1, 2, 8, 16, 32)):
        curves[f"gradient, {groups} group{'s' * (groups > 1)}"] = (0.99, 0.8 - 0.1 * place, 0.1)
    curves |= changed
    return {
        ("standard", f"accuracy/run-seed{seed}/{name}/{place}"): [value + 0.002 * seed - 0.001]
        for name, curve in curves.items()
        for place, value in enumerate(curve)
        for seed in (0, 1)
    }


def fig2_values(changed=None):
    curves = {"standard/1.00x": (0.76, 0.5), "standard/2.00x": (0.765, 0.52), "apart/N128/eps0.4/n8": (0.71, 0.69)}
    curves |= {f"apart/N128/eps0.1/n{groups}": (0.79, 0.7) for groups in (1, 2, 8, 16, 32)}
    curves |= changed or {}
    return {
        (cell, f"accuracy/{which} perturbed/run-seed0/{place}"): [value]
        for cell, curve in curves.items()
        for which in ("means", "standard deviations")
        for place, value in enumerate(curve)
    }


# -- paper C -----------------------------------------------------------------------------------------------------------


def accuracies(points):
    """Clean, PGD-10 and AutoAttack accuracy by cell."""
    metrics = ("shared/clean", "shared/pgd10", "shared/autoattack")
    return {(name, metric): [value] for name, point in points.items() for metric, value in zip(metrics, point)}


def line(setting, names, up):
    """Points of a trade-off curve: clean accuracy falls and robustness rises along it; ``up`` lifts both."""
    count = len(names)
    return {
        f"{setting}/{name}": (85 - 20 * i / count + up, 35 + up, 15 + 10 * i / count + up)
        for i, name in enumerate(names)
    }


def trade_off(setting, ours, others, ours_up=1.0):
    kl = line(setting, [f"{ours}{beta:g}" for beta in figures_c.KL_BETAS], ours_up)
    mat = line(setting, [f"mat_cat_{gamma:g}" for gamma in reversed(figures_c.GAMMAS)], 0.0)
    trades = line(setting, [f"{others}{beta:g}" for beta in figures_c.TRADES_BETAS], -3.0)
    return {**kl, **mat, **trades, f"{setting}/adversarial_training": (60.0, 34.0, 20.0)}


FIG2 = trade_off(LARGE, "mat_cat_0.5_kl_", "trades_cat_")
FIG3 = {
    name: point
    for setting in (LARGE, "imagenette/eps16")
    for name, point in trade_off(setting, "mat_cat_0.5_dbn_kl_", "trades_seq_").items()
}
FIG6 = trade_off("cifar10/eps8", "mat_cat_0.5_dbn_kl_", "trades_seq_")
FIG5 = {f"{LARGE}/mat_cat_{gamma:g}": (70 + 10 * gamma, 31.0, 24 - 10 * gamma) for gamma in (0.1, 0.2, 0.25)}
FIG5 |= {f"{LARGE}/mat_cat_{gamma:g}": (90 + gamma, 33.0, 5 - gamma) for gamma in (0.3, 0.4, 0.5, 0.75)}
SEC32 = {f"{LARGE}/trades_cat_{beta}": (92.0, 33.0, 3.0) for beta in ("0.25", "0.5")} | {
    f"{LARGE}/normal": (94.0, 0.0, 0.0)
}


def plane(cell, centres):
    """Two images of each kind at a distance of 1 from their centre, in two layers."""
    return {
        (cell, f"layers/{layer}/points/{kind}/{image}/{component}"): [centre * (component == 0) + image - 0.5]
        for layer in ("layer1.0.bn1", "layer4.1.bn2")
        for kind, centre in centres.items()
        for image in (0, 1)
        for component in (0, 1)
    }


FALSE_PLANE = plane(f"{LARGE}/mat_cat_0.5", {"clean": -5.0, "adv": 5.0, "autoattack": 1.0})
PAIRED_PLANE = plane(f"{LARGE}/mat_cat_0.5_kl_0.4", {"clean": -1.0, "adv": 1.0, "autoattack": 0.0})


def shift(sequential, concatenated):
    """Distances along training, twice as large for adversarial images."""
    return {
        (f"{LARGE}/mat_{how}_0.25/along", f"{10 * place}/sums/{kind}"): [value * (1 + (kind == "adv"))]
        for how, course in (("seq", sequential), ("cat", concatenated))
        for place, value in enumerate(course, 8)  # 80, 90, 100, 110: in the order of numbers
        for kind in ("clean", "adv")
    }


# -- paper D -----------------------------------------------------------------------------------------------------------


LIGS = "networks/run/shifts/{}/mean"
NORMED = trainings.NORMED


def trend(epochs=(5, 20, 75, 150), **cells):
    """Cells by their LIGS, robust and clean accuracy, the same all along."""
    names = (LIGS.format("gaussian"), "shared/pgd10", "shared/clean")
    return {
        (cell, f"{epoch}/{name}"): value
        for cell, values in cells.items()
        for name, value in zip(names, values)
        for epoch in epochs
    }


def smooth(**cells):
    """Smoothness along training; after half of it, gradients vanish and the order turns."""
    return {
        (cell, f"{epoch}/networks/run/batches/{batch}/smoothness"): value if epoch < 100 else 1e-3 / value
        for cell, value in cells.items()
        for batch in (0, 1)
        for epoch in (5, 20, 75, 150)
    }


def table2():
    pgd = {"none": 30.0, "bn": 20.0, "in": 10.0, "ln": 20.0, "gn": 20.0}
    networks = [*tables.SMALL, *tables.LARGE2]
    cells = {f"{data}/{model}/{norm}".lower(): pgd[norm] for data, model in networks for norm in pgd}
    return {(cell, "shared/pgd l2 0.25"): value for cell, value in cells.items()} | {
        ("cifar10/resnet50/bn", "shared/pgd l2 0.25"): 5.0  # the exception
    }


def table3():
    return {
        (f"{training}/gn", f"accuracy/{training}/{source}/{training}/{target}"): value
        + 10 * (source == "none")
        - 0.1 * (source == "in")
        for training, value in (("standard", 0.2), ("robust", 50.0))
        for source, target in itertools.product(trainings.NORM_NAMES, repeat=2)
    }


def fig1():
    accuracy = dict.fromkeys(("gaussian_noise", "speckle_noise", "shot_noise"), (60, 40))
    accuracy |= {"impulse_noise": (30, 40)}  # no part of the claim
    accuracy |= {"fog": (30, 50), "contrast": (30, 50), "snow": (50, 50)}
    better = {"none": 0, "bn": -1, "in": 1, "ln": 0, "gn": 0}
    by_training = {"gaussian_noise": 10, "speckle_noise": 10, "shot_noise": 10, "fog": -10, "contrast": -10}
    return {
        (f"{training}/{norm}", f"networks/run/accuracy/{name}/{level}"): pair[norm != "none"]
        + better[norm]
        + by_training.get(name, 0) * (training == "robust")
        for training in ("standard", "robust")
        for norm in trainings.NORM_NAMES
        for name, pair in accuracy.items()
        for level in range(5)
    }


def fig2():
    values = {("none", 5): 0.9, ("none", 150): 0.6, ("bn", 5): 0.7, ("bn", 150): 0.3}
    shifts = ("gaussian", "uniform", "fgsm", "pgd")
    return {(cell, f"{at}/{LIGS.format(shift)}"): value for (cell, at), value in values.items() for shift in shifts}


def less_robust(*norms):
    standard = {f"standard/{norm}": (0.3, 10, 90) for norm in norms} | {"standard/none": (0.6, 30, 85)}
    return trend(**standard, **{f"robust/{norm}": (0.97, 70, 80) for norm in ("none", *norms)})


def fig8():
    factors = trend(**dict.fromkeys(figures.FACTORS, (0.3, 10, 90)), base=(0.3, 10, 90))
    higher, crossing = ("width/2", "activation/selu", "optimizer/adam"), ("weight_decay/0.005", "lr/0.5")
    early = trend((5,), **dict.fromkeys((*higher, *crossing), (0.32, 10, 90)))
    late = trend((150,), **dict.fromkeys(higher, (0.32, 10, 90)))
    late |= trend((150,), **dict.fromkeys((*crossing, "depth/34", "depth/50"), (0.28, 10, 90)))
    return factors | early | late | trend(none=(0.6, 30, 85))


def fig9():
    shortcuts = {f"{model}{end}": (0.3, 10, 91) for model in figures.SHORTCUTS for end in ("", "_noshortcut")}
    return trend(**shortcuts, **{f"fixup_{model}": (0.5, 20, 90) for model in figures.SHORTCUTS})


def fig11():
    clean = {"none": 66, "bn": 71, "in": 60, "ln": 68, "gn": 69}
    models = ("resnet18", "resnet50")
    return trend(**{f"{m}/{norm}": (0.5 + 0.3 * (norm == "none"), 1, clean[norm]) for m in models for norm in clean})


def conflict(recipe):
    aligned = {("bn", 5): (70, 20), ("bn", 150): (20, 50), ("none", 5): (40, 10), ("none", 150): (60, 10)}
    kinds = ("robust", "non_robust")
    return {
        (f"{recipe}/{norm}", f"{epoch}/aligned_with_{kind}_features/0"): value
        for (norm, epoch), pair in aligned.items()
        for kind, value in zip(kinds, pair)
    }


MADE_UP = {
    "D/table2": table2,
    "D/table3": table3,
    "D/fig1": fig1,
    "D/fig2": fig2,
    "D/fig4": lambda: less_robust("bn"),
    "D/fig5": lambda: trend(
        **{"bn": (0.3, 10, 94), "bn/ligs": (0.9, 40, 92), "none": (0.6, 30, 90), "none/ligs": (0.9, 45, 89)}
    ),
    "D/fig6": lambda: (
        trend(**{"D_R/none": (0.95, 40, 75), "D_R/bn": (0.95, 45, 80), "D_rand/none": (0.9, 10, 10)})
        | trend((5,), **{"D_rand/bn": (0.7, 10, 10)})
        | trend((20,), **{"D_rand/bn": (0.8, 10, 10)})
        | trend((150,), **{"D_rand/bn": (0.2, 0, 60)})
    ),
    "D/fig7": lambda: conflict("D_conflict"),
    "D/fig8": fig8,
    "D/fig9": fig9,
    "D/fig10": lambda: less_robust("in", "ln", "gn"),
    "D/fig11": fig11,
    "D/fig12": lambda: trend(**{"D_R/bn": (0.95, 0, 0), "D_NR/bn": (0.5, 0, 0), "D_rand/bn": (0.2, 0, 0)}),
    "D/fig13": lambda: conflict("D_det"),
    "D/fig14": lambda: smooth(none=10.0, bn=2.0, **{"in": 11.0, "ln": 12.0, "gn": 13.0}),
    "D/fig15": lambda: smooth(none=10.0, bn=2.0, **{"in": 8.0, "ln": 7.0, "gn": 8.0}),
    "D/fig16": lambda: smooth(resnet18=2.0, resnet18_noshortcut=3.0),
    "D/fig17": lambda: smooth(resnet20=2.0, resnet56=2.0, fixup_resnet20=3.0, fixup_resnet56=4.0),
}


# -- paper E -----------------------------------------------------------------------------------------------------------


def statistics(cell, series):
    """Values as an analysis of channels records them."""
    return {
        (cell, f"statistics/{name}/{what}/{channel}"): [number]
        for name, parts in series.items()
        for what, numbers in parts.items()
        for channel, number in enumerate(numbers)
    }


def e_fig5():
    clean, adv = {"mean": [-0.2, 0.1], "std": [1.0, 1.5]}, {"mean": [-0.4, 0.2], "std": [1.5, 1.8]}
    return statistics("mbn_hybrid/pgd30", {"NS^clean_running": clean, "NS^adv_running": adv})


def e_fig6():
    stored, other = {"mean": [0.0, 1.0], "std": [1.0, 2.0]}, {"mean": [0.01, 1.0], "std": [1.0, 2.5]}
    return statistics("adv/pgd30", {"running": stored, "batch 1": stored, "batch 2": other})


def in_seeds(values):
    return {place: [float(value)] for place, value in values.items()}


INVENTED = {
    "A/fig2": lambda: CURVES,
    "A/fig4": lambda: CHANNELS,
    "A/fig5": lambda: CHANNELS,
    "A/fig6": lambda: LAYERS,
    "A/fig7": lambda: GAPS,
    "B/fig1": fig1_values,
    "B/fig2": fig2_values,
    "C/fig1": lambda: FALSE_PLANE | PAIRED_PLANE,
    "C/fig2": lambda: accuracies(FIG2),
    "C/fig3": lambda: accuracies(FIG3),
    "C/fig4": lambda: shift((2, 20, 4, 25), (16, 8, 3, 1)),
    "C/fig5": lambda: accuracies(FIG5),
    "C/fig6": lambda: accuracies(FIG6),
    "C/sec3.2": lambda: accuracies(SEC32),
    **{name: (lambda make=make: in_seeds(make())) for name, make in MADE_UP.items()},
    "E/fig5": e_fig5,
    "E/fig6": e_fig6,
    "E/sec4.2": lambda: in_seeds(
        {("hybrid/pgd30/eps8", f"shared/pgd{n}"): 60 - n**0.1 for n in (10, 20, 100, 500, 2000)}
    ),
}
