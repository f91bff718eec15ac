"""How a training computes: its precision, the network compiled, the attack and the step replayed as CUDA graphs.

None of it changes what is computed but for rounding; where a model does not allow it, training goes on without, and
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError, first_line
from advnorm._core.precision import kernels
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import attacked
from advnorm.attacks.fast_copy import FastCopy, fast_copy
from advnorm.objectives import Objective, Step
from advnorm.objectives.base import Images
from advnorm.objectives.second_pass import SecondPass
from advnorm.surgery import strip

Precision = Literal["float32", "tf32", "bf16"]
R = TypeVar("R")

#: Variants of one network: a route, a statistics mode and a batch size each. PyTorch's own limit is 8 per process.
VARIANTS = 64
#: Runs of an attack or a step before it is captured: the first compiles, the second lets the libraries settle.
WARM_UP = 2
#: What other threads do meanwhile is no error: one may be pinning the memory of the next batch.
CAPTURE = "thread_local"


class Say(Protocol):
    def __call__(self, message: str) -> None: ...


def forwards(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Scope of a forward: autocast to bf16, or nothing.

    Without autocast's cache of weights, which is emptied only when the outermost scope ends: inside another autocast
    every step would go on with the first step's weights.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def room_for_variants() -> AbstractContextManager[Any]:
    """Scope: as many variants of one network as a training has; then torch's own limit again."""
    limit = max(torch._dynamo.config.recompile_limit, VARIANTS)  # pyright: ignore
    return torch._dynamo.config.patch(recompile_limit=limit)  # pyright: ignore


class Compiled:
    """A compiled function; what cannot be compiled runs as it is, which is said."""

    def __init__(self, eager: Callable[[Tensor], Any], what: str, say: Say) -> None:
        self._eager, self._what, self._say = eager, what, say
        self._compiled: Callable[[Tensor], Any] = torch.compile(eager, dynamic=False)
        self.works = True

    def __call__(self, x: Tensor) -> Any:
        if self.works:
            try:
                return self._compiled(x)
            except torch._dynamo.exc.TorchDynamoException as error:  # pyright: ignore
                self._say(f"{self._what} cannot be compiled and runs as it is: {first_line(error)}")
                self.works = False
        return self._eager(x)


def compile_network(objective: Objective, say: Say) -> None:
    """Let the objective's forwards, in the attack and in training, go through a compiled network."""
    objective.through = Compiled(objective.through, "the network", say)


class Places:
    """Where the parameters and buffers of a model lie: what copies and graphs of it read.

    A module that puts another tensor in the place of its buffer (``self.mean = 0.9 * self.mean + ...``) leaves them
    behind with the old one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str, str, Tensor, int]] = [
            (values, name, f"{path}.{name}".lstrip("."), value, value.data_ptr())
            for path, module in model.named_modules()
            for values in (module._parameters, module._buffers)
            for name, value in values.items()
            if value is not None
        ]

    def left(self) -> str | None:
        """What to say of a tensor that lies elsewhere now; waits for no device."""
        for values, name, path, value, pointer in self._places:
            if values.get(name) is not value or value.data_ptr() != pointer:
                return f"the model has put another tensor in the place of {path}; change it in place"
        return None

    def restore(self) -> None:
        """Put back every tensor that was there."""
        for values, name, _, value, _ in self._places:
            values[name] = value


def runs_compiled(objective: Objective) -> bool:
    """Whether the network's forwards are compiled, as far as they have been tried."""
    return isinstance(objective.through, Compiled) and objective.through.works


def attack_a_copy(objective: Objective, say: Say) -> None:
    """Let the attack climb on a bfloat16 copy of its branch, with norms and activations inside the convolutions.

    The copy takes the weights and statistics anew before every attack. Where there is nothing to gain (other norms,
    attacks on batch statistics) the attack goes on as it was; also where a copy cannot be made or disagrees, which is
    said when the training starts.
    """
    if objective.attack is None or objective.attack.statistics != "running":
        return
    problems: list[str] = []
    copy = _copy_of_branch(objective, problems.append)
    if copy is not None or problems:
        problem = problems[0] if problems else None
        objective.adversarial = _AttackOnCopy(objective, copy, problem, say)  # pyright: ignore


def _copy_of_branch(objective: Objective, on_refusal: Callable[[str], object]) -> FastCopy | None:
    try:
        branch = strip(objective.model, objective.attacked_branch, linked=True).eval()
    except AdvnormError:  # a mixture has no norm to fold
        return None
    except (RuntimeError, TypeError) as error:  # a model that cannot be copied
        on_refusal(first_line(error))
        return None
    copy = fast_copy(branch, following=True, on_refusal=on_refusal)
    return copy if copy is not None and copy.folded else None


class _AttackOnCopy:
    """``adversarial(x, y, index)`` with the copy brought up to date; the first batch shows whether it agrees."""

    #: What its logits may differ by, of the largest; and how much farther than the network's own in bfloat16 the
    #: gradients of an image may point from those in float32, by their cosine.
    LOGITS, COSINE = 0.05, 0.05
    #: Images of the first batch whose gradients are compared.
    IMAGES = 32

    def __init__(self, objective: Objective, copy: FastCopy | None, problem: str | None, say: Say) -> None:
        self._objective, self._adversarial, self._copy, self._say = objective, objective.adversarial, copy, say
        self._problem, self._checked, self._places = problem, False, Places(objective.model)
        if copy is not None:
            objective.climbed = Compiled(copy, "the attack's copy of the network", say)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        if not self._checked:
            self._leave(self._problem or self._disagreement(x))
            self._checked = True
        if self._copy is not None and self._objective.climbed is not None:
            self._leave(self._places.left())
            self._copy.refresh()
        return self._adversarial(x, y, index)

    def _leave(self, problem: str | None) -> None:
        """Attack the network itself from now on, if there is a problem."""
        if problem is not None:
            self._say(f"the attack climbs on the network itself, not on a fast copy: {problem}")
            self._objective.climbed = None

    def _disagreement(self, x: Tensor) -> str | None:
        """What the copy computes otherwise than the network in float32.

        With all parameters and statistics shaken: a training starts from zeros and ones, the same in all banks, and
        what is wrong with them would show later.
        """
        objective, copy, few = self._objective, self._copy, x[: self.IMAGES]
        assert copy is not None and objective.climbed is not None
        once = partial(kernels, deterministic=torch.backends.cudnn.deterministic, tried=len(x) <= self.IMAGES)
        with shaken(objective.model), attacked(objective.model, route=objective.attacked_branch) as predict:
            copy.refresh()
            try:
                with once(), torch.autocast(x.device.type, enabled=False):
                    logits, gradient = _logits_and_gradient(predict, few)
                with once(), forwards("bf16", x.device):
                    _, rounded = _logits_and_gradient(predict, few)
                # The very function that the attack will climb, with as many images.
                found, climbed = (value[: self.IMAGES] for value in _logits_and_gradient(objective.climbed, x))
            except Exception as error:  # no such kernel for this device or shape, no gradient at all, anything
                return first_line(error)
        gap = (found - logits).abs().max() / logits.abs().max()
        if not gap <= self.LOGITS:
            return f"its logits are off by {gap:.0%} of the largest"
        usual, cosine = (
            torch.nn.functional.cosine_similarity(one.flatten(1), gradient.flatten(1)).mean()
            for one in (rounded, climbed)
        )
        return None if cosine >= usual - self.COSINE else f"its gradients point elsewhere, cosine {cosine:.2f}"


def _logits_and_gradient(predict: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the direction of the gradient of their squares: of all of them, and far from saturation."""
    x = x.detach().requires_grad_()
    logits = predict(x)
    known = logits.detach()
    (gradient,) = torch.autograd.grad(logits, x, known / known.abs().max())  # a deep network may start from 1e34
    return known, gradient.double()


@contextmanager
def shaken(model: nn.Module) -> Iterator[None]:
    """Scope: parameters and statistics differ by up to a fifth, and are not zero; afterwards each has its own bits.

    Tensors without a place for each of their numbers stay as they are: empty and expanded ones.
    """
    tensors = [value for value in (*model.parameters(), *model.buffers()) if value.is_floating_point() and _own(value)]
    kept = [value.detach().clone() for value in tensors]
    try:
        with torch.no_grad():
            for place, value in enumerate(tensors):
                one = ImageNoise(place, torch.zeros(1, dtype=torch.int64, device=value.device))
                noise = 2 * one.uniform(value.shape)[0] - 1
                size = value[0].numel() ** -0.5 if value.dim() > 1 else 0.1
                value.copy_(torch.where(value.any(), value * (1 + noise / 5), size * noise))
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(tensors, kept)  # pyright: ignore[reportPrivateImportUsage]


def _own(value: Tensor) -> bool:
    """Whether a tensor has numbers, each in a place of its own."""
    return value.numel() > 0 and all(step or size == 1 for size, step in zip(value.shape, value.stride()))


def capture_attack(objective: Objective, say: Say) -> None:
    """Replay the objective's attack as a CUDA graph: ten steps are hundreds of launches, which a small batch waits for.

    Parameters and statistics are read where they are, so that a replay sees their present values.
    """
    objective.adversarial = CapturedAttack(objective, objective.adversarial, say)  # pyright: ignore


class Replays(Generic[R]):
    """What is captured when it comes back: a replay for each key, of which the last one is kept.

    A graph reads the tensors of ``model`` where they were, so that there is none where the model puts others there.
    """

    def __init__(self, what: str, say: Say, model: nn.Module, *, works: bool = True) -> None:
        self._what, self._say, self._model = what, say, model
        self._places: Places | None = None
        self._key: Any = None
        self._seen = 0
        self.replay: R | None = None
        self.works = works

    def of(self, key: Any, capture: Callable[[], R]) -> R | None:
        """The replay for a key; None where it runs as it is: at first, and where it cannot be captured."""
        if not self.works:
            return None
        if key != self._key:
            self._key, self._seen, self.replay = key, 0, None
        self._seen += 1
        if self.replay is not None and self._places is not None:
            self._give_up(self._places.left())
        elif self._seen > WARM_UP:
            self._places = Places(self._model)
            try:
                self.replay = capture()
            except RuntimeError as error:
                self._give_up(first_line(error))
            else:
                self._give_up(self._places.left())
            if not self.works:
                self._places.restore()  # a tensor that a capture put there was never computed
        return self.replay

    def _give_up(self, problem: str | None) -> None:
        if problem is not None:
            self.works, self.replay = False, None
            self._say(f"{self._what} cannot be captured as a CUDA graph and runs as it is: {problem}")


class CapturedAttack:
    """``adversarial(x, y, index)`` by graph replay, a graph for each attack and batch shape."""

    def __init__(self, objective: Objective, adversarial: Callable[[Tensor, Tensor, Tensor], Tensor], say: Say) -> None:
        self._objective, self._adversarial = objective, adversarial
        self.replays: Replays[Callable[[Tensor, Tensor, Tensor], Tensor]] = Replays("the attack", say, objective.model)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        attack = self._objective.attack
        if getattr(attack, "statistics", None) == "batch":
            return self._adversarial(x, y, index)
        key = (attack, x.shape, x.stride(), self._objective.training)
        replay = self.replays.of(key, partial(self._captured, x, y, index))
        return (replay or self._adversarial)(x, y, index)

    def _captured(self, *inputs: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        static = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._adversarial(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE):
            outputs = self._adversarial(*static)

        def replay(*inputs: Tensor) -> Tensor:
            for place, value in zip(static, inputs):
                place.copy_(value)
            graph.replay()
            return outputs.clone()

        return replay


def replayable(objective: Objective) -> bool:
    """Whether a step draws nothing but what its images' identities give; the noise of a regularizer is drawn anew."""
    inner = objective.objective if isinstance(objective, SecondPass) else objective
    return inner is inner.bare


class CapturedStep:
    """The loss of given images and the gradients of the parameters, by graph replay: hundreds of launches at once.

    The first steps run as they are. Gradients lie where the replay writes them; what it returns is overwritten by the
    next one.
    """

    def __init__(self, objective: Objective, precision: Precision, device: torch.device, say: Say) -> None:
        self._objective, self._forwards = objective, partial(forwards, precision, device)
        works = device.type == "cuda"
        self.replays: Replays[Callable[[Images], Step]] = Replays(
            "the training step", say, objective.model, works=works
        )

    def __call__(self, images: Images) -> Step:
        """Set every parameter's gradient, and feed the statistics once."""
        shapes = [value if value is None else (value.shape, value.stride()) for value in images]
        replay = self.replays.of((shapes, self._objective.statistics), partial(self._captured, images))
        if replay is not None:
            return replay(images)
        if not self.replays.works:
            return self._step(images)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # where gradients are accumulated is where they will be
            step = self._step(images)
        torch.cuda.current_stream().wait_stream(stream)
        return step

    def _step(self, images: Images) -> Step:
        for parameter in self._objective.parameters():
            parameter.grad = None
        with self._forwards():
            step = self._objective.measured(images)
        step.loss.backward()
        return step._replace(
            loss=step.loss.detach(), logits={domain: logits.detach() for domain, logits in step.logits.items()}
        )

    def _captured(self, images: Images) -> Callable[[Images], Step]:
        static = images.map(Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE):
            step = self._step(static)
        gradients = [(parameter, parameter.grad) for parameter in self._objective.parameters()]

        def replay(images: Images) -> Step:
            for place, value in zip(static, images):
                if place is not None and value is not None:
                    place.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            graph.replay()
            return step

        return replay
