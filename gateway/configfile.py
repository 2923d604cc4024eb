"""From YAML text to typed values, with every complaint naming its place.

Three steps. *Compose*: YAML events become `Node`s, plain values that remember the line they came from. The composer is
ours and not PyYAML's, as a configuration is also an attack surface and a source of surprises: it knows no tags, counts
what aliases expand to, bounds the depth, refuses a key given twice, and reads scalars by YAML 1.2's core schema (`no`
is a word, `010` is no number). *Override*: a flag is one more Node in the tree, whose origin is the flag. *Read*: the
tree is walked along the type hints of msgspec Structs, where a `Rule` in an annotation reads one value. Nothing stops
at the first complaint: all are collected, and raised as one `ConfigError`, one a line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import msgspec
import yaml

from gateway.errors import ConfigError

MAX_BYTES = 1 << 20  # of a configuration file
MAX_VALUES = 50_000  # in it, with every alias expanded
MAX_DEPTH = 32  # the deepest key there is stands at 4
MAX_COMPLAINTS = 50  # past these nobody reads on
SHOWN = 80  # characters of a value that a complaint repeats

INVALID: Any = object()  # what could not be read; its complaint is recorded


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One value and where it was written. Collections hold Nodes; a dict is never changed, as aliases share it."""

    value: Any
    origin: str  # "FILE, line 7", or "--port"
    literal: bool = False  # a flag's value: the shell has had its turn with ${NAME}
    template: str | None = None  # the text before ${NAME} was replaced in it
    size: int = 1  # values in it, aliases expanded


class BadValue(Exception):
    """Raised by a rule. `found` says what is wrong if repeating the value does not; `expected` replaces the rule's."""

    def __init__(self, found: str | None = None, expected: str | None = None):
        super().__init__(found)
        self.found, self.expected = found, expected


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How one value is read, in the metadata of an `Annotated` type. `read` gives the value or raises BadValue."""

    expected: str
    read: Callable[[Any], Any]
    file: bool = False  # the value names a file, relative to the configuration's own directory


@dataclasses.dataclass(frozen=True, slots=True)
class OneOrMany:
    """Metadata of a list type: one value may stand for a list of one."""

    expected: str


class Complaints:
    """What is wrong, in the order found."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.paths: list[str] = []

    def add(self, origin: str, path: str, text: str) -> None:
        self.lines.append(": ".join(part for part in (origin, path, text) if part))
        self.paths.append(path)

    def clean(self, *keys: str) -> bool:
        """Whether nothing was said about these top level keys, so that what they say together can be judged."""
        return not any(re.split(r"[.\[]", path)[0] in keys for path in self.paths)

    def raise_if_any(self) -> None:
        if not self.lines:
            return
        more = len(self.lines) - MAX_COMPLAINTS
        raise ConfigError("\n".join(self.lines[:MAX_COMPLAINTS] + ([f"and {more} more"] if more > 0 else [])))


def describe(value: object) -> str:
    """A value as the operator would write it, cut short, on one line and without control characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict) and value:
        return "a mapping"
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        return "a list"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    # A key may hold anything; one that would not read as a key is shown quoted.
    shown = key if re.fullmatch(r"[\w.-]{1,80}", key) else describe(key)
    return f"{path}.{shown}" if path else shown


# ---- compose

_CORE = (  # YAML 1.2, 10.3.2, but for numbers with leading zeros, which 1.1 reads as octal: they stay text
    (re.compile(r"(?:~|null|Null|NULL|)"), lambda _: None),
    (re.compile(r"(?:true|True|TRUE)"), lambda _: True),
    (re.compile(r"(?:false|False|FALSE)"), lambda _: False),
    (re.compile(r"[-+]?(?:0|[1-9][0-9]{0,30})"), int),
    (re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_QUOTE = " (a ${NAME} inside { } or [ ] needs quotes)"


def resolve(text: str) -> Any:
    """The value of a plain scalar."""
    return next((make(text) for pattern, make in _CORE if pattern.fullmatch(text)), text)


def compose(path: Path, complaints: Complaints) -> Node:
    """The tree of a file: always a mapping. What leaves no tree to go on with is raised at once."""
    root = compose_any(path, complaints)
    if root.value is None:
        return dataclasses.replace(root, value={})
    if not isinstance(root.value, dict):
        raise ConfigError(f"{root.origin}: found {describe(root.value)} at the top; expected a mapping of keys")
    return dataclasses.replace(root, origin=str(path))


def compose_any(path: Path, complaints: Complaints) -> Node:
    """The tree of a file, whatever it is of; None for an empty file."""
    text = _text(path)
    try:
        return _Composer(text, str(path), complaints).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        hint = mark is not None and "${" in text[: mark.index].rpartition("\n")[2] + text[mark.index : mark.index + 1]
        raise ConfigError(f"{where}: not valid YAML: {what}{_QUOTE if hint else ''}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            octets = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}); expected a YAML file") from None
    if len(octets) > MAX_BYTES:
        raise ConfigError(f"{path}: found more than {MAX_BYTES} bytes; expected at most {MAX_BYTES}")
    try:
        text = octets.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = octets.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: found octet 0x{octets[error.start]:02x}; expected UTF-8") from None
    if bad := _UNPRINTABLE.search(text):
        line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - text.rfind("\n", 0, bad.start())
        where = f"{path}, line {line}, column {column}"
        raise ConfigError(f"{where}: found the control character U+{ord(bad[0]):04X}; expected printable text")
    return text


class _Composer:
    def __init__(self, text: str, name: str, complaints: Complaints):
        self.name, self.complaints = name, complaints
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.anchors: dict[str, Node] = {}
        self.count = 0

    def document(self) -> Node:
        next(self.events)  # the stream's start
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return Node(None, self.name)
        root = self.node(next(self.events), "", 0)
        next(self.events)  # the document's end
        if not isinstance(event := next(self.events), yaml.StreamEndEvent):
            self.stop(event, "", "found a second YAML document; expected one")
        return root

    def origin(self, event: Any) -> str:
        return f"{self.name}, line {event.start_mark.line + 1}"

    def stop(self, event: Any, path: str, text: str) -> NoReturn:
        self.complaints.add(self.origin(event), path, text)
        self.complaints.raise_if_any()
        raise AssertionError("unreachable")

    def node(self, event: Any, path: str, depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                self.stop(event, path, f"found *{event.anchor}; expected the name of an anchor that is complete above")
            return self.anchors[event.anchor]
        if event.tag is not None:
            tag = describe(str(event.tag).replace("tag:yaml.org,2002:", "!!"))
            self.stop(event, path, f"found the YAML tag {tag}; expected a value without a tag")
        if depth > MAX_DEPTH:
            self.stop(event, path[:SHOWN], f"found more than {MAX_DEPTH} levels of nesting; expected fewer")
        self.count += 1
        if isinstance(event, yaml.ScalarEvent):
            made = Node(event.value if event.style else resolve(event.value), self.origin(event))
        elif isinstance(event, yaml.SequenceStartEvent):
            made = self.sequence(event, path, depth)
        else:
            made = self.mapping(event, path, depth)
        if max(self.count, made.size) > MAX_VALUES:
            self.stop(event, path, f"found more than {MAX_VALUES} values, aliases expanded; expected fewer")
        # Only now, when it is complete: an alias inside its own anchor would have no end.
        if event.anchor:
            self.anchors[event.anchor] = made
        return made

    def sequence(self, start: Any, path: str, depth: int) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            item = self.node(event, join(path, len(items)), depth + 1)
            items.append(dataclasses.replace(item, origin=self.origin(event)))
        return Node(items, self.origin(start), size=1 + sum(item.size for item in items))

    def mapping(self, start: Any, path: str, depth: int) -> Node:
        found: dict[str, Node] = {}
        merged: list[Node] = []
        while not isinstance(key := next(self.events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent) or key.tag is not None:
                self.stop(key, path, "found a key that is not plain text; expected the name of a key")
            name, inside = key.value, join(path, key.value)
            value = dataclasses.replace(self.node(next(self.events), inside, depth + 1), origin=self.origin(key))
            if name == "<<" and not key.style:
                merged += value.value if isinstance(value.value, list) else [value]
            elif name in found:
                first = found[name].origin.rpartition(", ")[2]
                self.complaints.add(self.origin(key), inside, f"found a second time, after {first}; expected once")
            else:
                found[name] = value
        for other in merged:
            if not isinstance(other.value, dict):
                self.stop(start, path, f"found {describe(other.value)} under <<; expected mappings")
            found = {**other.value, **found}
        return Node(found, self.origin(start), size=1 + sum(node.size for node in found.values()))


# ---- override


def put(node: Node, keys: tuple[str, ...], leaf: Node) -> Node:
    """The tree with `leaf` at `keys`. A parent that is no mapping is left for the reader to complain about."""
    if not keys:
        return leaf
    if node.value is not None and not isinstance(node.value, dict):
        return node
    inner: dict[str, Node] = node.value or {}
    child = inner.get(keys[0], Node({}, leaf.origin))
    return dataclasses.replace(node, value={**inner, keys[0]: put(child, keys[1:], leaf)})


def get(node: Node, keys: tuple[str, ...]) -> Node | None:
    found: Node | None = node
    for key in keys:
        found = found.value.get(key) if found is not None and isinstance(found.value, dict) else None
    return found


# ---- read

_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)(\}?)")


def substitute(text: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return "${"
        if not match[2] or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", match[1]):
            raise BadValue(f"found {describe(match[0])}", "${NAME}, or $${ for a ${ as it stands")
        if match[1] not in environ:
            raise BadValue(f"found ${{{match[1]}}}, which the environment does not set", f"the environment variable {match[1]}")
        return environ[match[1]]

    return _VARIABLE.sub(value, text)


class Reader:
    """Reads a tree along type hints. `supported` names keys of which this version knows some values only."""

    def __init__(
        self,
        complaints: Complaints,
        environ: Mapping[str, str],
        directory: Path,
        supported: Mapping[str, tuple[object, ...]],
    ):
        self.complaints, self.environ, self.directory, self.supported = complaints, environ, directory, supported
        self.origins: dict[str, str] = {}
        self.root: type[msgspec.Struct] | None = None

    def origin(self, path: str) -> str:
        """Where a key was written, or else the nearest thing around it that was."""
        while path and path not in self.origins:
            path = re.sub(r"(?:\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", path)
        return self.origins.get(path, "")

    def complain(self, path: str, found: str, expected: str) -> Any:
        self.complaints.add(self.origin(path), path, f"{found}; expected {expected}")
        return INVALID

    def read(self, hint: Any, node: Node, path: str) -> Any:
        """The value of a node, or INVALID."""
        self.origins[path] = node.origin
        before = len(self.complaints.lines)
        hint, rules, nullable = _unwrap(hint)
        if isinstance(node.value, str) and not node.literal and node.template is None:
            try:
                text = substitute(node.value, self.environ)
            except BadValue as bad:
                return self.complain(path, bad.found or "", bad.expected or "")
            if text != node.value:
                # What stands in the environment is text; where a number or a flag belongs it is read as one.
                value = resolve(text) if hint in (int, float, bool) else text
                node = dataclasses.replace(node, value=value, template=node.value)
        if nullable and node.value is None:
            value = None
        else:
            value = self._read(hint, rules, node, path, " or null" if nullable else "")
        known = None if path.endswith("]") else self.supported.get(re.sub(r"\[\d+\]", "", path))
        if known is not None and len(self.complaints.lines) == before and value not in known:
            choice = " or ".join(describe(choice) for choice in known)
            text = f"{describe(value)} is not supported by this version; expected {choice}"
            self.complaints.add(node.origin, path, text)
        return value

    def _read(self, hint: Any, rules: tuple[Any, ...], node: Node, path: str, tail: str) -> Any:
        rule = next((rule for rule in rules if isinstance(rule, Rule)), None)
        if rule is not None:
            return self.by_rule(rule, node, path, tail)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.struct(hint, node, path)
        if get_origin(hint) is list:
            many = next((rule for rule in rules if isinstance(rule, OneOrMany)), None)
            return self.sequence(get_args(hint)[0], many, node, path, tail)
        if get_origin(hint) is Literal:
            if node.value in get_args(hint) and isinstance(node.value, str):
                return node.value
            expected = one_of(get_args(hint)) + tail + nearest(node.value, get_args(hint))
            return self.complain(path, f"found {describe(node.value)}", expected)
        if hint is bool:
            if isinstance(node.value, bool):
                return node.value
            return self.complain(path, f"found {describe(node.value)}", "true or false" + tail)
        if get_origin(hint) is dict and not isinstance(node.value, dict):
            return self.complain(path, f"found {describe(node.value)}", "a mapping" + tail)
        if (of := _of_named(hint)) is not None:
            read = {name: self.read(of, child, join(path, name)) for name, child in node.value.items()}
            return {name: value for name, value in read.items() if value is not INVALID}
        return plain(node)

    def by_rule(self, rule: Rule, node: Node, path: str, tail: str) -> Any:
        value = node.value
        if rule.file and isinstance(value, str) and value:
            value = str(self.directory / value)
        try:
            return rule.read(value)
        except BadValue as bad:
            found = bad.found or f"found {describe(node.value)}"
            if rule.file and bad.found:
                # A variable here may by mistake hold the secret itself: only its name is shown.
                found = f"found {describe(node.template or value)}, which {bad.found}"
            return self.complain(path, found, (bad.expected or rule.expected) + tail)

    def sequence(self, hint: Any, many: OneOrMany | None, node: Node, path: str, tail: str) -> Any:
        items = node.value
        one = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
        if many and isinstance(items, dict if one else str):
            return [value for value in (self.read(hint, node, path),) if value is not INVALID]
        if not isinstance(items, list) or (many and not items):
            least = ", and one at least" if items == [] else ""
            return self.complain(path, f"found {describe(items)}", (many.expected if many else "a list") + tail + least)
        values = [self.read(hint, item, join(path, index)) for index, item in enumerate(items)]
        return [value for value in values if value is not INVALID]

    def struct(self, hint: type[msgspec.Struct], node: Node, path: str) -> Any:
        if self.root is None:
            self.root = hint
        if not isinstance(node.value, dict):
            return self.complain(path, f"found {describe(node.value)}", "a mapping of " + _listed(hint))
        fields, hints = _members(hint)
        values = {}
        for key, child in node.value.items():
            inside = join(path, key)
            if key not in fields:
                self.origins[inside] = child.origin
                self.unknown(hint, path, inside, key)
                continue
            name = fields[key].name
            if child.value is None and _is_section(hints[name]):
                continue  # a key whose lines are all commented out: as if it were not there
            values[name] = self.read(hints[name], child, inside)
        missing = [field.encode_name for field in fields.values() if field.required and field.name not in values]
        for key in missing:
            self.complain(join(path, key), "found nothing", "a value: this key has no default")
        values = {name: value for name, value in values.items() if value is not INVALID}
        if any(field.required and field.name not in values for field in fields.values()):
            return INVALID
        return hint(**values)

    def unknown(self, hint: type[msgspec.Struct], path: str, inside: str, key: str) -> None:
        """Complain, naming the nearest known key: a slip among its neighbours, or a key that lives elsewhere."""
        siblings = [field.encode_name for field in msgspec.structs.fields(hint)]
        near = [join(path, name) for name in difflib.get_close_matches(key, siblings, 1)]
        assert self.root is not None
        near = near or [known for known in known_paths(self.root) if known.rpartition(".")[2] == key]
        if near:
            text = f"unknown key; the nearest known key is {near[0]}"
        else:
            nearest = join(path, difflib.get_close_matches(key, siblings, 1, 0.0)[0])
            text = f"unknown key; expected one of {', '.join(siblings)}; the nearest known key is {nearest}"
        self.complaints.add(self.origin(inside), inside, text)


@functools.cache
def _members(hint: type[msgspec.Struct]) -> tuple[Mapping[str, msgspec.structs.FieldInfo], Mapping[str, Any]]:
    """By key, and their hints by name. Cached, as to find them costs more than all else there is to one backend of many."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(hint)}
    return fields, typing.get_type_hints(hint, include_extras=True)


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """The bare type, its metadata, and whether null may stand for it."""
    rules: tuple[Any, ...] = ()
    nullable = False
    while True:
        if get_origin(hint) is Annotated:
            hint, *metadata = get_args(hint)
            rules = (*rules, *metadata)
        elif get_origin(hint) in (typing.Union, types.UnionType):
            kinds = tuple(arg for arg in get_args(hint) if arg is not types.NoneType)
            if len(kinds) == len(get_args(hint)):
                return hint, rules, nullable  # several kinds of value: its rule tells them apart
            hint, nullable = typing.Union[kinds], True  # noqa: UP007  of one kind, it is that kind
        else:
            return hint, rules, nullable


def _of_named(hint: Any) -> type[msgspec.Struct] | None:
    """The section that a mapping of any names has under each."""
    of = get_args(hint)[1] if get_origin(hint) is dict else None
    return of if isinstance(of, type) and issubclass(of, msgspec.Struct) else None


def _is_section(hint: Any) -> bool:
    bare, rules, nullable = _unwrap(hint)
    if nullable or any(isinstance(rule, Rule) for rule in rules):
        return False
    return get_origin(bare) in (list, dict) or (isinstance(bare, type) and issubclass(bare, msgspec.Struct))


def _listed(hint: type[msgspec.Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(hint))


def one_of(choices: tuple[object, ...]) -> str:
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def nearest(word: object, choices: Sequence[str]) -> str:
    """What to add to a complaint about a word that is none of `choices`, if one of them is like it."""
    known = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), known, 1) if isinstance(word, str) and len(word) <= SHOWN else []
    return f"; the nearest is {known[near[0]]}" if near else ""


def known_paths(hint: type[msgspec.Struct], path: str = "") -> Iterator[str]:
    """Every key path there is, lists with their brackets."""
    hints = typing.get_type_hints(hint, include_extras=True)
    for field in msgspec.structs.fields(hint):
        inside = join(path, field.encode_name)
        yield inside
        bare, rules, _ = _unwrap(hints[field.name])
        if get_origin(bare) is list:
            bare, inside = get_args(bare)[0], inside + "[]"
        elif (of := _of_named(bare)) is not None:
            bare, inside = of, inside + ".NAME"
        if isinstance(bare, type) and issubclass(bare, msgspec.Struct) and not any(isinstance(r, Rule) for r in rules):
            yield from known_paths(bare, inside)


def tree_of(value: Any, origin: str) -> Node:
    """Plain data as a tree that stands in one place, with nothing of the environment put into it."""
    if isinstance(value, dict):
        value = {str(key): tree_of(child, origin) for key, child in value.items()}
    elif isinstance(value, list):
        value = [tree_of(child, origin) for child in value]
    return Node(value, origin, literal=True)


def plain(node: Node) -> Any:
    """A tree without its origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


# ---- render


class _Dumper(yaml.SafeDumper):
    """Quotes also what only YAML 1.2 takes for a number, as we do when we read it back."""


for _pattern, _ in _CORE[3:]:
    _Dumper.add_implicit_resolver("!core", re.compile(f"^(?:{_pattern.pattern})$"), list("-+.0123456789"))


def render(data: Mapping[str, object]) -> str:
    """Plain data as YAML that `compose` reads back as it was."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
