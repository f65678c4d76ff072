"""Configuration: precedence, sources, and what is said about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ipcsync import config
from ipcsync.config_cli import config as command
from ipcsync.errors import InvalidArgument


def test_the_later_source_wins_and_is_named(tmp_path: Path) -> None:
    site = ("site.toml", {"namespace": "site", "broker": {"http": "127.0.0.1:1", "linger": True}})
    user = ("user.toml", {"broker": {"http": "127.0.0.1:2", "max_sessions": 5}})
    found = config.resolve([site, user], {"IPCSYNC_BROKER_MAX_SESSIONS": "7", "IPCSYNC_BROKER_LINGER": "false"})
    assert found["namespace"] == config.Value("site", "site.toml")
    assert found["broker.http"] == config.Value("127.0.0.1:2", "user.toml")
    assert found["broker.max_sessions"] == config.Value(7, "$IPCSYNC_BROKER_MAX_SESSIONS")
    assert found["broker.linger"] == config.Value(False, "$IPCSYNC_BROKER_LINGER")
    assert found["broker.log_format"] == config.Value("text", "default")


@pytest.mark.parametrize("text", ["1001,1002", "1001, 1002", "1001 1002 "])
def test_a_list_in_the_environment_has_commas_or_blanks(text: str) -> None:
    assert config.resolve([], {})["broker.allow_uid"] == config.Value([], "default")
    assert config.resolve([], {"IPCSYNC_BROKER_ALLOW_UID": text})["broker.allow_uid"].value == [1001, 1002]
    assert config.resolve([("f", {"broker": {"allow_uid": [7]}})], {})["broker.allow_uid"] == config.Value([7], "f")


@pytest.mark.parametrize(
    ("content", "environ", "says"),
    [
        ({"namspace": "a"}, {}, "f: there is no setting 'namspace'; did you mean 'namespace'?"),
        ({"broker": {"max_session": 1}}, {}, "did you mean 'broker.max_sessions'?"),
        ({"broker": {"log_format": "xml"}}, {}, "f: broker.log_format = 'xml'"),
        ({"broker": {"max_sessions": "5"}}, {}, "f: broker.max_sessions = '5'"),
        ({"broker": 1}, {}, "there is no setting 'broker'"),
        ({}, {"IPCSYNC_BROKER_MAX_SESSIONS": "many"}, "IPCSYNC_BROKER_MAX_SESSIONS = 'many'"),
        ({}, {"IPCSYNC_BROKER_MAX_SESSIONS": "0"}, ">= 1"),
        ({}, {"IPCSYNC_BROKER_ALLOW_UID": "1001,me"}, "IPCSYNC_BROKER_ALLOW_UID"),
        ({"broker": {"allow_uid": 1001}}, {}, "f: broker.allow_uid = 1001"),
        ({"runtime_owner": -1}, {}, "f: runtime_owner = -1"),
        ({}, {"IPCSYNC_NAMESPCE": "a"}, "there is no variable IPCSYNC_NAMESPCE; did you mean IPCSYNC_NAMESPACE?"),
        ({}, {"IPCSYNC_NAMESPACE": "a b"}, "IPCSYNC_NAMESPACE = 'a b'"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(
    content: dict[str, object], environ: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.resolve([("f", content)], environ)
    assert says in str(caught.value)


def test_an_empty_variable_sets_nothing_and_others_are_nobodys_business() -> None:
    found = config.resolve([], {"IPCSYNC_NAMESPACE": "", "IPCSYNC_REQUIRE_CUDA": "1"})
    assert found["namespace"].source == "default"


def test_the_files_are_the_sites_and_the_users_or_the_one_named(tmp_path: Path) -> None:
    assert config.files({config.FILE: "/a/b.toml"}) == [Path("/a/b.toml")]
    site, user = config.files({})
    assert site != user
    assert site.name == user.name == "config.toml"


def test_a_named_file_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="which does not exist"):
        config.load({config.FILE: str(tmp_path / "no.toml")})
    bad = tmp_path / "bad.toml"
    bad.write_text("a = [")
    with pytest.raises(InvalidArgument, match=r"bad\.toml is no TOML"):
        config.load({config.FILE: str(bad)})


def test_the_command_prints_values_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text('namespace = "mine"\n[broker]\nhttp = "127.0.0.1:9464"\n')
    monkeypatch.setenv(config.FILE, str(path))
    monkeypatch.setenv("IPCSYNC_BROKER_LOG_FORMAT", "json")
    told = json.loads(CliRunner().invoke(command, ["--json"], catch_exceptions=False).stdout)
    assert told["namespace"] == {"value": "mine", "source": str(path)}
    assert told["broker.log_format"] == {"value": "json", "source": "$IPCSYNC_BROKER_LOG_FORMAT"}
    text = CliRunner().invoke(command, [], catch_exceptions=False, env={"COLUMNS": "200"}).stdout
    assert "127.0.0.1:9464" in text
    assert "$IPCSYNC_BROKER_LOG_FORMAT" in text
