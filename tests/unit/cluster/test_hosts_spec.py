"""Hosts files, `--on`, the arguments of ssh and its errors. No host is contacted."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from shoal.cluster.hosts.facts import refuse_one_machine_twice, refuse_shared_address
from shoal.cluster.hosts.spec import DEFAULT_FOLDER, Host, HostsSpec, is_here, parse_hosts, read_hosts
from shoal.cluster.hosts.ssh import (
    explain,
    explain_end,
    framed,
    on_each,
    shell_path,
    ssh_argv,
    values_or_raise,
    variables,
)
from shoal.cluster.target import parse_on, rank_count
from shoal.errors import ConfigError, HostError, ShoalError, UsageError

SPEC = HostsSpec(path=Path("hosts.toml"), hosts=(Host(host="me@laptop-b"),))
HOST = SPEC.hosts[0]


def from_toml(text: str) -> HostsSpec:
    return parse_hosts(text, Path("cluster/hosts.toml"))


def refused(text: str, name: str = "cluster/hosts.toml") -> ShoalError:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, Path(name))
    assert caught.value.fix
    return caught.value


# The file


def test_a_cluster_file_is_parsed() -> None:
    spec = from_toml(
        'ssh_config = "ssh/config"\n[[host]]\nhost = "me@laptop-b"\nslots = 2\nweight = 2\n'
        '[[host]]\nname = "attic"\nhost = "10.0.0.9"\naddress = "192.168.7.9"\ninterface = "wg0"\nthreads = 3\n'
        'python = "~/env/bin/python"\nfolder = "/srv/shoal/"\n'
    )
    first, second = spec.hosts
    assert spec.ssh_config == Path("cluster/ssh/config")
    assert first == Host(host="me@laptop-b", name="laptop-b", slots=2, weight=2.0, folder=DEFAULT_FOLDER)
    assert (second.name, second.address, second.interface, second.threads) == ("attic", "192.168.7.9", "wg0", 3)
    assert (second.python, second.folder) == ("~/env/bin/python", "/srv/shoal")


@pytest.mark.parametrize(
    ("line", "host", "slots"),
    [
        ("laptop-b", "laptop-b", 1),
        ("laptop-b slots=4", "laptop-b", 4),
        ("laptop-b\tslots = 4 max_slots=8  # upstairs", "laptop-b", 4),
        ("laptop-b max-slots=8", "laptop-b", 1),
        ("me@laptop-b:3", "me@laptop-b", 3),
        ("fd00::9", "fd00::9", 1),
    ],
)
def test_a_line_of_a_hostfile_is_parsed(line: str, host: str, slots: int) -> None:
    (parsed,) = parse_hosts(f"# machines\n\n{line}\n", Path("machines")).hosts
    assert (parsed.host, parsed.slots) == (host, slots)


def test_a_hostfile_may_name_the_interface() -> None:
    assert parse_hosts("b:2 ifname=eth1 binding=user:0,1", Path("machines")).hosts[0].interface == "eth1"


def test_a_file_with_a_host_table_is_a_cluster_file_whatever_its_name() -> None:
    assert parse_hosts('[[host]]\nhost = "b"\n', Path("machines.txt")).hosts[0].host == "b"


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    error = refused('[[host]]\nhost = "laptop-b"\nslot = 2\n')
    assert error.seen == "unknown setting slot of host 'laptop-b' in cluster/hosts.toml"
    assert error.why == "did you mean 'slots'?"
    assert refused('ssh_confg = "x"\n[[host]]\nhost = "b"').why == "did you mean 'ssh_config'?"
    assert refused("b slot=2", "machines").why == "did you mean 'slots'?"


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ('slots = "two"', "slots='two' of host 'b' in cluster/hosts.toml: input should be a valid integer"),
        ("slots = 0", "slots=0 of host 'b'"),
        ("slots = true", "slots=True of host 'b'"),
        ("weight = -1", "weight=-1 of host 'b'"),
        ("weight = nan", "weight=nan of host 'b'"),
        ('address = "laptop-c"', "address='laptop-c' of host 'b' in cluster/hosts.toml: ranks find each other by"),
        ('name = "../b"', "name='../b' of host '../b'"),
        ('python = "env/bin/python"', "python='env/bin/python' of host 'b'"),
        ('folder = "shoal"', "folder='shoal' of host 'b'"),
    ],
)
def test_a_wrong_value_is_named_with_its_host(settings: str, seen: str) -> None:
    assert refused(f'[[host]]\nhost = "b"\n{settings}\n').seen.startswith(seen)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "two words", "", "tab\there"])
def test_an_invalid_host_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="of host"):
        parse_hosts(f"[[host]]\nhost = {host!r}\n".replace("'", '"'), Path("hosts.toml"))


@pytest.mark.parametrize(
    ("text", "name", "seen"),
    [
        ("", "hosts.toml", "hosts.toml lists no host"),
        ("# no host\n", "machines", "machines lists no host"),
        ("[[host]]\nslots = 2\n", "hosts.toml", "the 1. [[host]] of hosts.toml does not say which host it is"),
        ('host = "b"', "hosts.toml", "host in hosts.toml is not a list of tables"),
        ("ssh_config = 3\n[[host]]\n", "hosts.toml", "ssh_config=3 in hosts.toml is not a file name"),
        ("[[host]", "hosts.toml", "hosts.toml is not valid TOML"),
        ("b slots=many", "machines", "line 1 of machines: slots=many is not a number"),
        ("# x\nb and more", "machines", "line 2 of machines: 'and more' is not a setting"),
    ],
)
def test_an_invalid_hosts_file_is_refused(text: str, name: str, seen: str) -> None:
    assert refused(text, name).seen.startswith(seen)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("b\nc\nb slots=2\n", "machines lists the host b twice"),
        ("me@b\nB\n", "machines lists the host B twice"),
        ('[[host]]\nhost="b"\nname="x"\n[[host]]\nhost="c"\nname="x"\n', "two hosts in machines have the name x"),
        (
            '[[host]]\nhost="b"\naddress="10.0.0.1"\n[[host]]\nhost="c"\naddress="10.0.0.1"\n',
            "two hosts in machines have the address 10.0.0.1",
        ),
    ],
)
def test_a_machine_that_is_listed_twice_is_refused(text: str, seen: str) -> None:
    assert refused(text, "machines").seen == seen


def test_two_hosts_with_one_address_are_refused() -> None:
    with pytest.raises(
        HostError, match=r"b and c in hosts\.toml are the same machine: both have the address 10\.0\.0\.1"
    ):
        refuse_shared_address({"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.1"}, SPEC)


def test_setup_refuses_this_machine_by_a_second_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: Host, spec: HostsSpec) -> str:
        if host.name == "jump":
            raise HostError("jump has no address")
        return "127.0.0.1"

    monkeypatch.setattr("shoal.cluster.hosts.facts._resolve", resolve)
    here, alias, unknown = Host(host="localhost"), Host(host="alias"), Host(host="jump")
    with pytest.raises(HostError, match="localhost in hosts\\.toml are the same machine"):
        refuse_one_machine_twice(HostsSpec(path=Path("hosts.toml"), hosts=(here, alias)))
    # ssh may know a way to a host whose name leads to no address.
    refuse_one_machine_twice(HostsSpec(path=Path("hosts.toml"), hosts=(here, unknown)))


def test_an_unreadable_hosts_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no hosts file"):
        read_hosts(tmp_path / "no.toml")
    with pytest.raises(UsageError, match="cannot read"):
        read_hosts(tmp_path)
    file = tmp_path / "hosts.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hosts(file)
    file.write_text('ssh_config = "no"\n[[host]]\nhost = "b"\n')
    with pytest.raises(ConfigError, match=r"names .*/no, which is not a file"):
        read_hosts(file)


# The option --on


def test_on_accepts_a_hosts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machines").write_text("b slots=2\nc\n")
    on = parse_on(str(tmp_path / "machines"))
    assert isinstance(on, HostsSpec)
    assert rank_count(on) == 3
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_on("machines"), HostsSpec)
    for missing in ("hosts.toml", "my.hosts", "other/machines"):
        with pytest.raises(UsageError, match="there is no hosts file"):
            parse_on(missing)
    with pytest.raises(UsageError, match="names no cluster"):
        parse_on("machine")


def test_names_of_this_machine_are_recognized() -> None:
    local_names = {
        "localhost",
        "local",
        "127.0.0.1",
        "127.0.1.1",
        "::1",
        socket.gethostname(),
        f"{getpass.getuser()}@localhost",
    }
    assert all(is_here(Host(host=host)) for host in local_names)
    assert is_here(Host(host="some-alias", address="127.0.0.1"))
    for host in ("laptop-b", "192.0.2.1", "other-user@localhost"):
        assert not is_here(Host(host=host)), host


# Arguments and errors of ssh


def test_ssh_uses_the_users_configuration_and_never_prompts() -> None:
    argv = ssh_argv(HOST, SPEC.model_copy(update={"ssh_config": Path("/a/config")}))
    assert argv[:3] == ["ssh", "-F", "/a/config"]
    assert argv[-2:] == ["--", "me@laptop-b"]
    assert "BatchMode=yes" in argv
    assert not any("StrictHostKeyChecking" in word for word in argv), "the user's setting for host keys applies"


def test_values_are_quoted_for_a_script() -> None:
    assert variables(a="it's $HOME", b="x") == "a='it'\"'\"'s $HOME'\nb=x\n"
    assert shell_path("~/my env/python") == "\"$HOME\"/'my env/python'"
    assert framed("true", "mark").startswith("{\n"), "the shell reads the whole script before it runs a line"


def explained(stderr: str, code: int = 255) -> HostError:
    error = explain(HOST, SPEC, code, stderr)
    assert error.seen
    assert error.fix
    return error


@pytest.mark.parametrize(
    ("stderr", "seen"),
    [
        ("ssh: Could not resolve hostname lptop: Name or service not known", "known by the name lptop"),
        ("ssh: connect to host b port 22: Connection refused", "no SSH server answers"),
        ("ssh: connect to host b port 22: No route to host", "there is no way to laptop-b"),
        ("ssh: connect to host b port 22: Connection timed out", "did not answer within 10 s"),
        ("Connection timed out during banner exchange", "did not answer within 10 s"),
        ("me@b: Permission denied (publickey,password).", "does not let this user in"),
        (
            "No ED25519 host key is known for b and you have requested strict checking.\nHost key verification failed.",
            "not known",
        ),
        ("/home/me/.ssh/config: line 3: Bad configuration option: hots", "does not accept its configuration"),
        ("kex_exchange_identification: Connection closed by remote host", "answered and hung up"),
        ("some unknown error", "cannot reach laptop-b over ssh"),
        ("", "cannot reach laptop-b over ssh"),
    ],
)
def test_an_error_of_ssh_is_explained(stderr: str, seen: str) -> None:
    assert seen in explained(stderr).seen


def test_a_missing_shell_is_explained() -> None:
    assert "there is no shell" in explained("This account is currently not available.", code=1).seen
    assert "there is no shell" in explained("bash: line 1: sh: command not found", code=127).seen


def test_a_changed_host_key_is_explained_with_the_exact_command() -> None:
    stderr = (
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nOffending ED25519 key in /home/a/known_hosts:7\n"
        "Host key for [b.lan]:2222 has changed and you have requested strict checking.\nHost key verification failed."
    )
    assert explained(stderr).fix == "ssh-keygen -f /home/a/known_hosts -R '[b.lan]:2222', then: ssh me@laptop-b"


def test_a_lost_connection_is_distinguished_from_a_killed_program() -> None:
    assert "connection to laptop-b was lost" in explain_end(HOST, 255, "Timeout, server b not responding.").seen
    assert "ended without an answer" in explain_end(HOST, 255, "").seen
    assert "ended without an answer" in explain_end(HOST, 137, "Killed").seen


def test_one_error_names_every_host_that_failed() -> None:
    hosts = [Host(host=name) for name in ("a", "b", "c")]

    def work(host: Host) -> str:
        if host.name != "b":
            raise HostError(f"{host.name} is off", why="no power", fix=f"start {host.name}")
        return host.name

    results = on_each(hosts, work)
    assert list(results) == ["a", "b", "c"]
    assert results["b"] == "b"
    with pytest.raises(HostError, match="2 of 3 hosts cannot be used") as caught:
        values_or_raise(results)
    assert caught.value.why == "a is off (no power)\nc is off (no power)"
    with pytest.raises(HostError, match="a is off"):
        values_or_raise({"a": results["a"], "b": "b"})
