"""The variants of the training step compute the same; each one runs the network and crafts images in its own way."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import advnorm
from advnorm import Config
from advnorm._core.precision import choose_kernels
from advnorm.objectives import LIGS, SAM, Objective, Standard
from advnorm.training.attack_on_copy import AttackOnCopy
from advnorm.training.compilation import CompiledFunction
from advnorm.training.cuda_graphs import CapturedAttack
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import CapturedProgram, CompiledProgram, StepProgram, make_step_program
from support.objective_oracles import tiny
from support.step_programs import CASES, SETTINGS, gradients_of, loop_of, snapshot, steps


@pytest.fixture
def compiled(monkeypatch) -> list:
    """Functions that are compiled, which run as they are: a compiler takes seconds."""
    functions = []
    monkeypatch.setattr(torch, "compile", lambda eager, **_: (functions.append(eager), eager)[1])
    return functions


@pytest.mark.parametrize("case", ["hybrid", "trades", "standard", "mixture"])
def test_every_variant_gives_the_same_bits_if_the_compiler_changes_nothing(tmp_path, compiled, case):
    eager, fast, replayed = (loop_of(tmp_path, compile=c, lr=0.1, **CASES[case]) for c in (False, True, True))
    replayed.program = CapturedProgram(replayed.objective, replayed.ranks, replayed.journal.log)
    assert type(eager.program) is StepProgram and type(fast.program) is CompiledProgram
    losses = [steps(loop, 3) for loop in (eager, fast, replayed)]
    assert losses[0] == losses[1] == losses[2]
    for loop in (fast, replayed):
        assert compiled.count(loop.objective.run_model) == (1 if loop is fast else 2)
        assert loop.program.runs_compiled and not eager.program.runs_compiled
        for values in (snapshot, gradients_of):
            assert all(torch.equal(values(loop)[name], value) for name, value in values(eager).items())


def test_training_and_attack_run_through_the_compiled_network(tmp_path, compiled):
    loop, calls = loop_of(tmp_path, compile=True), []
    network = loop.program.execution.network
    assert isinstance(network, CompiledFunction)
    network._compiled = lambda x: (calls.append(len(x)), loop.model(x))[1]
    steps(loop, 1)
    assert calls == [32] * 3 + [64], "three steps of the attack, and one forward of both domains"


def test_in_bf16_a_compiled_program_attacks_a_copy(tmp_path, compiled):
    loop = loop_of(tmp_path, compile=True, precision="bf16")
    craft = loop.program.execution.craft
    assert isinstance(craft, AttackOnCopy) and craft.execution.network is loop.program.execution.network
    calls = []
    surrogate = craft.execution.surrogate
    surrogate._compiled = lambda x: (calls.append(len(x)), craft.copy(x))[1]
    steps(loop, 1)
    assert calls == [32] * 4, "one forward of its check, and three steps of the attack"
    assert loop_of(tmp_path, compile=True, precision="float32").program.execution.craft is None
    assert loop_of(tmp_path, compile=False, precision="bf16").program.execution.craft is None


def test_the_variant_follows_from_device_ranks_and_objective(compiled):
    cuda, several = Ranks(device=torch.device("cuda", 0)), Ranks(device=torch.device("cuda", 0), world=2)

    def variant(objective: Objective, ranks: Ranks, *, compile: bool = True) -> type[StepProgram]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("advnorm.training.step_program.DistributedDataParallel", lambda module, **_: module)
            return type(make_step_program(objective, ranks, print, compiled=compile))

    standard = Standard(tiny("bn"))
    assert variant(standard, cuda, compile=False) is StepProgram
    assert variant(standard, Ranks(device=torch.device("cpu"))) is CompiledProgram
    assert variant(standard, several) is CompiledProgram
    assert variant(standard, cuda) is variant(SAM(standard), cuda) is CapturedProgram
    assert variant(LIGS(standard), cuda) is variant(SAM(LIGS(standard)), cuda) is CompiledProgram, "LIGS draws noise"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_on_cuda_the_attack_is_replayed_around_the_copy(tmp_path, compiled, precision):
    objective = loop_of(tmp_path, precision=precision).objective
    program = CompiledProgram(objective, Ranks(device=torch.device("cuda", 0)), print, precision=precision)
    craft = program.execution.craft
    assert isinstance(craft, CapturedAttack)
    assert isinstance(craft._craft, AttackOnCopy) == (precision == "bf16")


@pytest.mark.parametrize("works", [True, False])
def test_a_record_says_whether_the_network_ran_compiled(tmp_path, monkeypatch, works):
    def compiled(eager, **_):
        def run(x):
            if works:
                return eager(x)
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    config = Config.from_dict({**SETTINGS, "data": {"name": "synthetic", "size": 32}, "epochs": 1, "compile": True})
    run = advnorm.train(config, out=tmp_path, device="cpu")
    assert run.record["compiled"] is works
    assert ("cannot be compiled" in (run.folder / "log.txt").read_text()) is not works


@pytest.mark.parametrize(("deterministic", "benchmark"), [(False, True), (False, False), (True, True)])
def test_the_choice_of_kernels_is_left_as_it_was(deterministic, benchmark):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    with suppress(KeyError), choose_kernels(deterministic=deterministic, benchmark=benchmark):
        assert (cudnn.benchmark, cudnn.deterministic) == (benchmark and not deterministic, deterministic)
        raise KeyError
    assert (cudnn.benchmark, cudnn.deterministic) == before


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_valid_configuration(case):
    Config.from_dict({**SETTINGS, **CASES[case]})
