"""What the API reference shows of the source, where reading it without importing is not enough.

Settings, ``Annotated[int, Setting("Help.", "[1, inf)")]``, show their type, help and range. A function with the name of
its module, such as ``advnorm.evaluation.audit``, is shown instead of the module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import griffe


class Settings(griffe.Extension):
    """Replace the annotation of a declared setting by its type, and give a field its help as docstring."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        loader.resolve_aliases(implicit=True, external=False)
        for item in _walk(pkg):
            if item.is_attribute and item.parent.is_class and (declared := _declared(item.annotation, item.module)):
                item.annotation, help_text = declared
                item.docstring = griffe.Docstring(help_text, parent=item)
                item.labels.add("setting")
            elif item.is_function:
                for parameter in item.parameters:
                    if declared := _declared(parameter.annotation, item.module):
                        parameter.annotation = declared[0]


class Tables(griffe.Extension):
    """Settings as one table below the signature, after the built-in extension has made the signature of a dataclass."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for item in _walk(pkg):
            if item.docstring:
                item.docstring.value = re.sub(r":\w+:(?=`)", "", item.docstring.value)  # roles of another tool
            if item.is_class and "__init__" in item.members and item.docstring:
                lines = [f"    {p.name}: {p.docstring.value}" for p in item["__init__"].parameters if p.docstring]
                item.docstring.value += "\n\nArgs:\n" + "\n".join(lines) if lines else ""
        for item in [each for each in _walk(pkg) if "setting" in each.labels]:
            del item.parent.members[item.name]
        for module in [each for each in pkg.modules.values() if not each.is_alias and each.exports]:
            for name in module.exports:
                member, target = module.members.get(name), module.imports.get(name, "")
                if member is not None and member.is_module and target.startswith(f"{member.path}."):
                    module.members[name] = griffe.Alias(name, member[name], parent=module)


def _walk(item: griffe.Object) -> Iterator[griffe.Object]:
    for member in item.members.values():
        if not member.is_alias:
            yield member
            yield from _walk(member)


def _declared(annotation: Any, module: griffe.Module) -> tuple[Any, str] | None:
    """The type and the help of an annotation that declares a setting, also behind a name such as ``Steps``."""
    if isinstance(annotation, griffe.ExprName) and annotation.name in module.members:
        with suppress(griffe.AliasResolutionError):  # a name of another package
            target = module.members[annotation.name]
            annotation = target.value if target.is_attribute else annotation
    if not (isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated"):
        return None
    kind, *rest = annotation.slice.elements
    for item in rest:
        if isinstance(item, griffe.ExprCall) and str(item.function) == "Setting":
            words = [_literal(argument, module) for argument in item.arguments]
            return kind, f"{words[0]} In `{words[1]}`." if len(words) > 1 else words[0]
    return None


def _literal(argument: Any, module: griffe.Module) -> str:
    """The text of an argument: a literal, or the name of a constant."""
    if isinstance(argument, griffe.ExprName):
        argument = module.modules_collection[argument.canonical_path].value
    return ast.literal_eval(str(argument))
