"""Registries and their decorators."""

from advnorm._core.registry import Registry, keywords
from support.problems import raises_problem


def test_a_decorator_registers_and_returns_the_decorated_object():
    plain = Registry("thing")
    entries = Registry("model", lambda build, depth: (build, depth))

    @entries.register("resnet50", depth=50)
    @entries.register("resnet18", depth=18)
    @plain.register("resnet")
    def resnet(*, width: int = 1):
        return width

    assert resnet() == 1 and plain.get("resnet") is resnet and entries.get("resnet50") == (resnet, 50)
    assert list(entries) == ["resnet18", "resnet50"] == entries.names("resnet*") and len(list(entries)) == 2
    assert list(keywords(resnet)) == ["width"]


def test_an_unknown_name_gets_a_hint_and_a_second_registration_is_rejected():
    entries = Registry("model")
    entries.add("resnet18", 1)
    for wrong in ("resnet_18", 5, None):
        with raises_problem("unknown_name", "model") as caught:
            entries.get(wrong)
    with raises_problem("already_exists", "name"):
        entries.add("resnet18", 2)
    with raises_problem("unknown_name", "model") as caught:
        entries.get("resnet_18")
    assert "did you mean 'resnet18'?" in str(caught.value)
