"""Watched files: every way in which one is changed, both formats, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from gateway.control.discovery import file as files
from gateway.control.discovery.file import FileSource
from gateway.control.reload import read_members
from gateway.core.members import Member, Place
from gateway.errors import ConfigError
from tests.support.following import Follower, following
from tests.support.gateway import until

Follow = Callable[[str | Path], AbstractAsyncContextManager[Follower]]


def listed(*names: str) -> str:
    return json.dumps([{"url": f"http://{name}:8000", "name": name} for name in names])


def write(path: Path, text: str) -> None:
    """As who cares writes: a new file, renamed."""
    other = path.with_name(path.name + ".new")
    other.write_text(text)
    other.rename(path)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Follow:
    monkeypatch.setattr(files, "QUIET", 0.03)
    return lambda pattern: following(FileSource(str(pattern), 0.02, read_members), patch=monkeypatch.setattr)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "backends.yaml"
    path.write_text(listed("a"))
    return path


@pytest.fixture
async def told(follow: Follow, path: Path) -> AsyncIterator[Follower]:
    async with follow(path) as told:
        assert told.names == ["a"]
        yield told


async def test_what_two_files_say_alike_is_one_backend(follow: Follow, tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('[{"targets": ["a:1", "b:1"]}]')
    (tmp_path / "2.json").write_text('[{"targets": ["b:1", "c:1"]}]')
    async with follow(tmp_path / "*.json") as told:
        assert told.names == ["a:1", "b:1", "c:1"]


async def test_replaced(told: Follower, path: Path) -> None:
    """Of the same size and the same time: only the inode tells."""
    before = path.stat()
    other = path.with_name("other")
    other.write_text(listed("b"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)
    await told.say("b")


async def test_written_in_place(told: Follower, path: Path) -> None:
    path.write_text(listed("a", "b"))
    await told.say("a", "b")
    before = path.stat().st_size
    path.write_text(listed("c", "d"))
    assert path.stat().st_size == before
    await told.say("c", "d")


async def test_written_slowly(told: Follower, path: Path) -> None:
    """What is there while it is written is never taken for the whole."""
    whole = "".join(f"- {{url: 'http://{name}:8000', name: {name}}}\n" for name in "abcdefgh")
    with path.open("w") as file:
        for line in whole.splitlines(keepends=True):
            file.write(line)
            file.flush()
    await told.say(*"abcdefgh")
    assert len(told.snapshots) == 2


async def test_config_map(follow: Follow, tmp_path: Path) -> None:
    """A ConfigMap's volume: the file is a link into a directory that is itself a link, and that link is swapped."""
    for number, names in enumerate((("a",), ("a", "b"))):
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        (folder / "backends.yaml").write_text(listed(*names))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "backends.yaml").symlink_to("..data/backends.yaml")
    async with follow(tmp_path / "backends.yaml") as told:
        assert told.names == ["a"]
        (tmp_path / "..data_tmp").symlink_to("..1")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        await told.say("a", "b")


async def test_unchanged_is_not_said_again(told: Follower, path: Path) -> None:
    write(path, listed("a"))
    write(path, listed("a") + "\n")
    write(path, listed("b"))
    await told.say("b")
    assert len(told.snapshots) == 2


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("", "backends.yaml: found nothing at the top; expected a list of backends ([] for none)"),
        ("{}", "backends.yaml: found {} at the top; expected a list"),
        ("- {url: 'http://b'", "not valid YAML"),
        ("- {url: b}", "backends.yaml, line 1: backends[0].url: found 'b'; expected http://HOST[:PORT]"),
        ("- {url: 'http://b'}\n- {url: 'http://b'}", "line 2: backends[1].name: found b:80, as backends[0] is named"),
        ("- {url: 'http://b'}\n- {uri: 'http://c'}", "line 2: backends[1].uri: unknown key; the nearest known key is"),
        ("- {url: 'http://b', role: prefil}", "backends[0].role: found 'prefil'; expected both, prefill, decode or encode"),
        ("- {targets: ['b:1'], labels: {role: 3}}", "targets[0].role: found 3; expected both, prefill, decode or encode"),
        ("- {targets: b}", "backends[0].targets: found 'b'; expected a list"),
        ("- {targets: ['b:x']}", "backends[0].targets[0].url: found 'http://b:x'"),
        ("- {targets: ['b:1'], labels: {__scheme__: ftp}}", "found 'ftp://b:1'"),
        ("- {targets: ['b:1'], label: {}}", "backends[0].label: unknown key; the nearest known key is"),
        ("- {url: 'http://b', tls: {ca: nowhere.pem}}", "which cannot be read (No such file or directory)"),
    ],
)
async def test_a_bad_file_is_refused_whole(
    told: Follower, path: Path, bad: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Told of once, with file, line and key; the list of before goes on; a good one is taken as soon as it is there."""
    caplog.set_level("INFO")
    write(path, bad)
    await until(lambda: len(caplog.records) == 1, "a word of it")
    text = caplog.records[0].getMessage()
    assert expected in text, text
    assert text.endswith("; its last list goes on")
    path.touch()  # read again, and as bad
    write(path, listed("b"))
    await told.say("b")
    await until(lambda: "works again" in caplog.text, "that it works again")
    assert len(told.snapshots) == 2
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


async def test_gone_and_back(told: Follower, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is not there says nothing: it may be about to be replaced."""
    caplog.set_level("INFO")
    kept = path.with_name("kept")
    path.rename(kept)
    await until(lambda: "cannot be read (No such file or directory)" in caplog.text, "a word of it")
    kept.rename(path)
    await until(lambda: "works again" in caplog.text, "its return")
    assert told.names == ["a"]
    assert len(told.snapshots) == 1 + 1  # put in force anew, as it was


async def test_no_file_at_all(told: Follower, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe is not opened: whoever does would wait for ever, and so would the gateway's end."""
    path.unlink()
    os.mkfifo(path)
    await until(lambda: "is no regular file" in caplog.text, "a word of it")
    path.unlink()
    write(path, listed("b"))
    await told.say("b")


async def test_not_there_yet(follow: Follow, tmp_path: Path) -> None:
    async with follow(tmp_path / "later.json") as told:
        assert told.names is None
        write(tmp_path / "later.json", listed("a"))
        await told.say("a")


async def test_no_backends_is_an_answer(told: Follower, path: Path) -> None:
    write(path, "[]")
    await told.say()


async def test_a_pattern(follow: Follow, tmp_path: Path) -> None:
    """All files that fit, in the order of their names; those that come and go too. None at all says nothing."""
    (tmp_path / "b.json").write_text(listed("b"))
    async with follow(tmp_path / "*.json") as told:
        assert told.names == ["b"]
        write(tmp_path / "a.json", listed("a"))
        await told.say("a", "b")
        (tmp_path / "b.json").unlink()
        await told.say("a")
        write(tmp_path / "c.json", "nothing good")
        write(tmp_path / "d.json", listed("d"))
        (tmp_path / "c.json").unlink()
        await told.say("a", "d")
        for file in tmp_path.glob("*.json"):
            file.unlink()
        write(tmp_path / "e.json", listed("e"))
        await told.say("e")
    assert [] not in [list(snapshot) for snapshot in told.snapshots]


async def test_what_is_refused_elsewhere_is_tried_again(
    told: Follower, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a certificate that it names cannot be read just now."""
    told.refusal = "not now"
    write(path, listed("b"))
    await until(lambda: "not now" in caplog.text, "the refusal")
    told.refusal = None
    await told.say("b")


async def test_what_cannot_be_read_just_now_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for lack of a descriptor: it need not change for that."""
    monkeypatch.setattr(files, "QUIET", 0.01)
    monkeypatch.setattr(files, "AGAIN", 0.05)
    readable = True

    def read(path: Path) -> Sequence[Member]:
        if not readable:
            raise ConfigError(f"{path}: cannot be read (Too many open files)")
        return read_members(path)

    async with following(FileSource(str(path), 0.02, read), patch=monkeypatch.setattr) as told:
        assert told.names == ["a"]
        readable = False
        write(path, listed("b"))
        await until(lambda: "Too many open files" in caplog.text, "the failure")
        readable = True
        await told.say("b")
    assert caplog.text.count("Too many open files") == 1


class TestFormats:
    def read(self, tmp_path: Path, text: str) -> Sequence[Member]:
        path = tmp_path / "x"
        path.write_text(text)
        return read_members(path)

    def test_as_in_the_configuration(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every key; files are looked for beside it, and ${NAME} is taken from the environment."""
        (tmp_path / "key").write_text("secret\n")
        (tmp_path / "ca.pem").write_text("")
        monkeypatch.setenv("HOST", "vllm-3")
        one, two = self.read(
            tmp_path,
            "- url: https://${HOST}:8443\n  weight: 3\n  max_in_flight: 9\n  api_key_file: key\n  tls: {ca: ca.pem}\n"
            "- {url: 'unix:/run/vllm.sock', name: local}\n",
        )
        assert one.name == "vllm-3:8443"
        assert one.place == Place("https://vllm-3:8443")
        assert (one.weight, one.max_in_flight, one.credential, one.tls.ca) == (3, 9, b"secret", str(tmp_path / "ca.pem"))
        assert (two.name, two.place.url) == ("local", "unix:/run/vllm.sock")

    def test_of_prometheus(self, tmp_path: Path) -> None:
        """Targets, and of the labels the scheme and the role."""
        text = """[
          {"targets": ["10.0.0.1:8000", "[fd00::1]:8000", "vllm.internal"], "labels": {"env": "prod", "weight": "x"}},
          {"targets": ["10.0.0.2:8443"], "labels": {"__scheme__": "https", "role": "decode"}},
          {"targets": []}
        ]"""
        found = self.read(tmp_path, text)
        assert [m.role for m in found] == ["both", "both", "both", "decode"]
        assert [(m.name, m.place.url) for m in found] == [
            ("10.0.0.1:8000", "http://10.0.0.1:8000"),
            ("[fd00::1]:8000", "http://[fd00::1]:8000"),
            ("vllm.internal:80", "http://vllm.internal"),
            ("10.0.0.2:8443", "https://10.0.0.2:8443"),
        ]

    def test_both_in_one_file(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, "- targets: [a:1]\n- url: http://b:2\n  weight: 2")
        assert [(m.name, m.weight) for m in found] == [("a:1", 1), ("b:2", 2)]

    def test_a_target_of_two_groups_is_one_backend(self, tmp_path: Path) -> None:
        """Prometheus takes such a file. That it has two roles is nothing that it could mean here."""
        text = """[{"targets": ["a:1", "b:2", "a:1"], "labels": {"job": "x"}}, {"targets": ["a:1"], "labels": {"job": "y"}}]"""
        assert [m.name for m in self.read(tmp_path, text)] == ["a:1", "b:2"]
        with pytest.raises(ConfigError, match="found a:1, as backends"):
            self.read(tmp_path, "[{targets: [a:1]}, {targets: [a:1], labels: {role: decode}}]")

    def test_a_name_twice_over_both(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="found a:1, as backends"):
            self.read(tmp_path, "- targets: [a:1]\n- url: http://b\n  name: a:1")
