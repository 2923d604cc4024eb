"""The values a configuration is made of, each with the rule that reads it: addresses, URLs, files, secrets, numbers.

A rule takes what YAML gave and returns the value, or raises `BadValue`; the annotated types at the end are what the
structs of `config` are written in. Nothing here is lenient: what two programs could read in two ways is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import os
import re
from typing import Annotated, Any, TypeAlias

import msgspec

from gateway.configfile import BadValue, Node, OneOrMany, Rule, describe, plain
from gateway.synthetic.distribution import parse as parse_distribution
from gateway.synthetic.settings import MockSettings

_YEAR = 31_536_000  # longer is a slip of units, and past what timers take
_TIB = 1 << 40
_SECRET_BYTES = 8192
NAME_LENGTH = 128
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._:\[\]@+-]")
_SUN_PATH = 107  # octets of a Unix socket's path that the kernel takes


class Secret:
    """A secret read from a file. It shows itself to nobody who does not ask by name."""

    __slots__ = ("_text",)

    def __init__(self, text: str):
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))


class Address(msgspec.Struct, frozen=True):
    """Where to listen or to connect: a TCP host (IPv6 without brackets) and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        labels = text.removesuffix(".").split(".")
        # A last label of digits only is a mistyped IPv4 address to every resolver.
        named = all(re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", label) for label in labels)
        return named and len(text) <= 253 and not labels[-1].isdigit()


def parse_host_port(text: str, default_port: int | None = None) -> Address:
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]*))(?::([0-9]{1,5}))?", text)
    host = match and (match[1] or match[2])
    if match is None or not host or not is_host(host) or (match[1] and ":" not in host):
        raise BadValue
    port = default_port if match[3] is None else int(match[3])
    if port is None or port > 65535:
        raise BadValue(expected="a port from 0 to 65535 after the host")
    return Address(host.lower(), port)


def parse_unix(text: str) -> Address:
    path = text.removeprefix("unix:")
    path = path[2:] if path.startswith("///") else path
    octets = path.encode(errors="replace")
    if not path.startswith("/") or path.endswith("/") or not path.isprintable() or len(octets) > _SUN_PATH:
        raise BadValue(expected=f"unix: and an absolute path of at most {_SUN_PATH} octets")
    return Address(path=path)


def parse_address(value: Any) -> Address:
    if not isinstance(value, str):
        raise BadValue
    return parse_unix(value) if value.startswith("unix:") else parse_host_port(value)


def split_url(url: str) -> tuple[str, Address]:
    """The scheme and the address of a backend's URL."""
    if url.startswith("unix:"):
        return "unix", parse_unix(url)
    match = re.fullmatch(r"(?:([^/?#]*)://)?([^/?#]*)(.*)", url, re.DOTALL)
    scheme, authority, tail = match.groups("") if match else ("", "", "")
    if "@" in authority:  # perhaps a password: not repeated
        raise BadValue("found a URL with a user name or password", "none; api_key_file sends a key upstream")
    scheme = scheme.lower()
    if scheme not in ("http", "https") or not authority:
        raise BadValue
    if tail not in ("", "/"):
        part = {"/": "path", "?": "query", "#": "fragment"}[tail[0]]
        raise BadValue(f"found the {part} {describe(tail)}", f"none after HOST[:PORT]: the client's own {part} is sent")
    address = parse_host_port(authority, 443 if scheme == "https" else 80)
    if not address.port:
        raise BadValue(expected="a port from 1 to 65535 after the host")
    return scheme, address


def _url(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue
    scheme, address = split_url(value)
    return str(address) if scheme == "unix" else f"{scheme}://{value.partition('://')[2].rstrip('/').lower()}"


def _open(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except (OSError, ValueError) as error:
        raise BadValue(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _file(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadValue
    _open(value, 1)
    return value


def _secret(value: Any) -> Secret:
    return secret(_open(_file(value), _SECRET_BYTES + 1))


def secret(octets: bytes) -> Secret:
    """A secret that can stand in a header field: it goes upstream, or is compared with one that came in. Raises BadValue."""
    text = octets.rstrip(b"\r\n").decode("latin-1")
    if not text:
        raise BadValue("is empty")
    if len(octets) > _SECRET_BYTES:
        raise BadValue(f"holds more than {_SECRET_BYTES} bytes")
    if bad := re.search(r"[^\x20-\x7e]", text):
        kind = "a control octet" if ord(bad[0]) < 32 or ord(bad[0]) == 127 else "an octet that is not ASCII"
        raise BadValue(f"holds {kind} (0x{ord(bad[0]):02x}, octet {bad.start() + 1})")
    if text != text.strip(" "):
        raise BadValue("begins or ends with a blank")
    return Secret(text)


def seconds(zero: bool) -> Rule:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadValue
        if value > _YEAR or value < 0 or (value == 0 and not zero):
            raise BadValue
        return float(value)

    return Rule(f"{'zero or ' if zero else ''}a positive number of seconds, at most {_YEAR}", read)


def whole(low: int, high: int, what: str = "a whole number") -> Rule:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadValue
        return value

    return Rule(f"{what} from {low} to {high}", read)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadValue
    return float(value)


def _full(value: Any) -> int:
    if not isinstance(value, int) or value not in (429, 503):
        raise BadValue
    return value


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1000:
        raise BadValue
    return float(value)


def _delay(value: Any) -> str | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue
    try:
        parse_distribution(value)
    except ValueError:
        raise BadValue from None
    return value


def _tokens(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadValue
    try:
        parse_distribution(value, tokens=True)
    except ValueError:
        raise BadValue from None
    return value


def _fault(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue
    _of_the_mock(fault=(value,))
    return value


def _knobs(value: Any) -> dict[str, object]:
    """A mapping of the synthetic engine's knobs. The file's reader hands on what is below a rule as it is."""
    if not isinstance(value, dict):
        raise BadValue
    named = {name: plain(node) if isinstance(node, Node) else node for name, node in value.items()}
    _of_the_mock(knobs=named)
    return named


def _of_the_mock(**settings: Any) -> None:
    """What the synthetic engine itself says of a value: it knows the nearest word."""
    try:
        MockSettings(embedded=True, **settings)
    except ValueError as error:
        raise BadValue(f"found {str(error).partition(': ')[2]}", "what deploy/mock.md has") from None


def _text(pattern: str, expected: str) -> Rule:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise BadValue
        return value

    return Rule(expected, read)


def _name(value: Any) -> str:
    """A backend's name, which becomes a label and a part of the admin listener's paths. Empty: to be filled in."""
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= NAME_LENGTH or NOT_IN_NAME.search(value):
        raise BadValue
    return value


def _file_name(value: Any) -> str:
    """Of a file that need not be there yet."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadValue
    return value


def _file_pattern(value: Any) -> str:
    if any(character in os.path.dirname(_file_name(value)) for character in "*?["):
        raise BadValue(expected="a pattern in the last part of the path alone")
    return str(value)


def _dns_name(value: Any) -> str:
    if not isinstance(value, str) or not is_host(value) or _is_ip(value):
        raise BadValue
    return value.lower()


def _host(value: Any) -> str:
    if not isinstance(value, str) or not is_host(value.strip("[]")):
        raise BadValue
    return value.strip("[]").lower()


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _dns_server(value: Any) -> Address:
    if not isinstance(value, str):
        raise BadValue
    address = parse_host_port(f"[{value}]" if value.count(":") > 1 and not value.startswith("[") else value, 53)
    if not _is_ip(address.host) or not address.port:
        raise BadValue
    return address


def _kubernetes_port(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?", value):
        return value
    raise BadValue


Seconds: TypeAlias = Annotated[float, seconds(zero=False)]
SecondsOrZero: TypeAlias = Annotated[float, seconds(zero=True)]
Bytes: TypeAlias = Annotated[int, whole(1, _TIB, "a whole number of bytes")]
Count: TypeAlias = Annotated[int, whole(1, 1 << 31)]
CountOrZero: TypeAlias = Annotated[int, whole(0, 1 << 31)]
Delay: TypeAlias = Annotated[
    str | float, Rule("seconds, or a distribution as normal:MEAN:STDDEV or lognormal:MEDIAN:SIGMA", _delay)
]
Tokens: TypeAlias = Annotated[
    str | int, Rule("a number of tokens, or a distribution as uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA", _tokens)
]
Fault: TypeAlias = Annotated[str, Rule("a fault as reset@token:3", _fault)]
Knobs: TypeAlias = Annotated[dict[str, object], Rule("a mapping of the knobs in deploy/mock.md", _knobs)]
Share: TypeAlias = Annotated[float, Rule("a number from 0 to 1", _share)]
FullStatus: TypeAlias = Annotated[int, Rule("429 or 503", _full)]
Factor: TypeAlias = Annotated[float, Rule("a number from 1 to 1000", _factor)]
FieldName: TypeAlias = Annotated[str, _text(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}", "the name of a header field")]
Text: TypeAlias = Annotated[str, _text(r"[^\x00-\x1f\x7f]+", "text")]
ModelName: TypeAlias = Annotated[str, _text(r"[^\x00-\x1f\x7f]{1,256}", "the name of a model, of at most 256 characters")]
ClassName: TypeAlias = Annotated[str, _text(r"[A-Za-z0-9._-]{1,64}", "a name of at most 64 letters, digits and . _ -")]
UrlPath: TypeAlias = Annotated[str, _text(r"/[!-~]*", "a path that begins with /, without blanks")]
RoutePath: TypeAlias = Annotated[str, _text(r"/[!\"$->@-~]*", "a path that begins with /, without blanks or a query")]
Name: TypeAlias = Annotated[str, Rule(f"a name of at most {NAME_LENGTH} letters, digits and . _ - : [ ] @ +, or null", _name)]
File: TypeAlias = Annotated[str, Rule("the name of a file that can be read", _file, file=True)]
SecretFile: TypeAlias = Annotated[Secret, Rule("the name of a file that holds one secret", _secret, file=True)]
Listen: TypeAlias = Annotated[
    Address, Rule("HOST:PORT (an IPv6 address in brackets: '[::1]:8000') or unix:/PATH", parse_address)
]
ListenList: TypeAlias = Annotated[list[Listen], OneOrMany("HOST:PORT, unix:/PATH, or a list of them")]
Url: TypeAlias = Annotated[str, Rule("http://HOST[:PORT], https://HOST[:PORT] or unix:/PATH", _url)]
Port: TypeAlias = Annotated[int, whole(1, 65535, "a port")]
Recordings: TypeAlias = Annotated[str, Rule("the name of a folder of recordings (deploy/mock.md)", _file_name, file=True)]
FileName: TypeAlias = Annotated[str, Rule("the name of a file", _file_name, file=True)]
FilePattern: TypeAlias = Annotated[
    str, Rule("the name of a file, or a pattern of names, as DIR/*.json", _file_pattern, file=True)
]
Host: TypeAlias = Annotated[str, Rule("a host name or an IP address", _host)]
DnsName: TypeAlias = Annotated[str, Rule("a DNS name", _dns_name)]
DnsServer: TypeAlias = Annotated[Address, Rule("the IP address of a DNS server, with or without :PORT", _dns_server)]
KubernetesName: TypeAlias = Annotated[
    str, _text(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", "a name of lower case letters, digits and -, of at most 63 characters")
]
KubernetesPort: TypeAlias = Annotated[
    int | str, Rule("a port of the service's endpoints: its name, or its number", _kubernetes_port)
]
