"""Configurations for tests: good values of every setting, and exact round trips."""

import json
import pickle
from dataclasses import fields, replace

from advnorm.config import AttackConfig, Config, Named
from advnorm.config.text import parse_yaml
from advnorm.norms import list_norms

SETTINGS = [f.name for f in fields(Config)]

GOOD = {
    "model": [Named("resnet18"), Named("preact_resnet18", width=0.5)],
    "norm": list_norms("*bn")[:2],
    "norm_options": [{"momentum": 0.2}],
    "dual_head": [True],
    "weights": ["runs/a", "w.safetensors"],
    "data": [Named("synthetic", size=64)],
    "augment": ["flip", "crop_flip"],
    "held_out": [0.2, 100, 1],
    "mix": ["none", "mixup", "cutmix"],
    "mix_alpha": [0.2],
    "objective": [Named("trades", beta=3.0), Named("standard")],
    "regularizer": [None, Named("ligs", weight=0.5)],
    "second_pass": [None, Named("apart", samples=64, groups=2), Named("awp")],
    "threat": ["L2", "L1"],
    "eps": [0.0, 0.1, "16/255"],
    "attack": [AttackConfig(steps=3, step_size="2/255", start=0.2)],
    "eps_warmup_epochs": [3],
    "steps_warmup_epochs": [3],
    "second_pass_warmup_epochs": [3],
    "epochs": [1, 105],
    "budget": [4],
    "batch_size": [1, 1024],
    "accumulate": [1, 4],
    "recompute": [True],
    "monitor": [100],
    "monitor_attack": ["quick-steps10"],
    "optimizer": ["adam", "adamw", "adagrad"],
    "lr": [1e-12, 3.0],
    "momentum": [0.0],
    "nesterov": [True],
    "weight_decay": [0.0],
    "norm_weight_decay": [False],
    "grad_clip": [None, 0.5],
    "schedule": ["cosine", "one_cycle", "constant"],
    "milestones": [(5.0,), (2.5, 7.0)],
    "gamma": [1.0],
    "warmup_epochs": [0.5, 10.0],
    "peak_share": [0.2],
    "ema": [0.999],
    "ema_buffers": ["average"],
    "label_smoothing": [0.1],
    "running_epochs": [2],
    "train_only": ["all"],
    "sync_statistics": [True],
    "parallel": ["fsdp"],
    "precision": ["float32", "tf32", "bf16"],
    "channels_last": [True, False],
    "compile": [True, False],
    "deterministic": [True],
    "validate_every": [0, 5],
    "validation_attack": ["fgsm", "pgd20-restarts2", "training"],
    "validation_images": [500],
    "snapshots": [(1,), (2, 10)],
    "seed": [7],
    "name": ["my_run-1.0"],
}

#: Without these a setting has no effect and is rejected.
WITH = {
    "second_pass_warmup_epochs": {"second_pass": "awp"},
    "gamma": {"milestones": (5.0,)},
    "peak_share": {"schedule": "one_cycle"},
    "mix_alpha": {"mix": "mixup"},
    "monitor_attack": {"monitor": 100},
}


def check_round_trips(config):
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    assert Config.from_dict(parse_yaml(config.to_yaml())) == config
    assert eval(repr(config), {"Config": Config, "AttackConfig": AttackConfig, "Named": Named}) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config) == config and hash(replace(config)) == hash(config)
    again = Config.from_dict(config.to_dict())
    assert repr(again) == repr(config) and again.digest == config.digest  # 1 == 1.0, so that equality is not enough
