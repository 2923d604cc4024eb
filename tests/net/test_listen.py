"""A socket that cannot be had says what to do about it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gateway.configvalues import Address
from gateway.errors import ConfigError
from gateway.net import listen


def test_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on .*{port}: Address already in use; .*another port \(--port"):
            listen.bind(Address("127.0.0.1", port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_no_address_of_this_machine(host: str) -> None:
    """Another port would not help."""
    with pytest.raises(ConfigError, match="a name or an address of this machine") as error:
        listen.bind(Address(host, 0))
    assert "another port" not in str(error.value)


def test_only_what_was_bound_here_is_removed(tmp_path: Path) -> None:
    """Another process may have taken the path over meanwhile."""
    path = tmp_path / "s"
    with listen.bind(Address(path=str(path))) as own:
        file = listen.file_of(own)
        assert file is not None
        path.unlink()
        with socket.socket(socket.AF_UNIX) as others:
            others.bind(str(path))
            listen.forget([file])
            assert path.exists()
        path.unlink()
        listen.forget([file])  # which is not there any more
    with listen.bind(Address(path=str(path))) as own:
        file = listen.file_of(own)
        assert file is not None
        listen.forget([file])
        assert not path.exists()
    with listen.bind(Address("127.0.0.1", 0)) as tcp:
        assert listen.file_of(tcp) is None
