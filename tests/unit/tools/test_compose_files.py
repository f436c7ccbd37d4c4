"""What the containers mount is made once, and kept."""

import stat

from services.cli import models
from services.cli.models import ModelFiles
from tools import compose_files


def test_what_is_there_stays(tmp_path, monkeypatch) -> None:
    model = ModelFiles(tmp_path / "model.gguf", "tiny")
    monkeypatch.setattr(models, "defaults", lambda: [model, ModelFiles(tmp_path / "encoder", "vectors")])
    compose_files.make(tmp_path)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {"valkey_password", "grafana_password", "jwks.json", "token", "ca.pem", "worker.pem", "worker.key"} <= set(made)
    assert len(made["valkey_password"].strip()) == 64
    environment = (tmp_path / ".env").read_text()
    assert f"FOREBAY_MODEL_DIR={tmp_path}\nFOREBAY_MODEL_FILE=model.gguf\nFOREBAY_MODEL_NAME=tiny\n" in environment
    assert f"FOREBAY_EMBEDDING_DIR={tmp_path}/encoder\nFOREBAY_EMBEDDING_NAME=vectors\n" in environment
    (tmp_path / ".env").write_text("FOREBAY_MODEL_NAME=mine\n")
    compose_files.make(tmp_path)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert (tmp_path / ".env").read_text() == "FOREBAY_MODEL_NAME=mine\n"


def test_others_on_this_machine_are_kept_out_and_containers_let_in(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(models, "defaults", lambda: [ModelFiles(tmp_path / "model.gguf", "tiny")])
    compose_files.make(tmp_path)
    assert "EMBEDDING" not in (tmp_path / ".env").read_text(), "its package isn't installed"
    secrets = tmp_path / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()}
    assert modes["valkey_password"] == modes["grafana_password"] == modes["token"] == modes["jwks.json"] == 0o644
    assert modes["gateway.key"] == modes["scheduler.key"] == modes["worker.key"] == 0o644
    assert modes["ed25519.pem"] == modes["ca.key"] == 0o600, "no container needs them"
