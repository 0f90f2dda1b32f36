"""Verify: what changed is named, and what could not be loaded is said."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.bundle import seal


def test_verify_without_torch_checks_the_files_and_says_what_it_could_not(
    bundle: Path, without_packages: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = without_packages("verify", str(bundle), "--json")
    assert done.returncode == 0, done.stderr
    envelope = json.loads(done.stdout)
    assert {check["name"] for check in envelope["result"]["checks"]} >= {"files.sha256", "content_sha256"}
    assert "not installed" in envelope["warnings"][0]


def test_verify_fails_with_the_file_that_changed(quantkit: Any, bundle: Path) -> None:
    (bundle / "model" / "model.safetensors").write_text("Weights")
    ran = quantkit("verify", bundle)
    assert ran.code == 1
    assert "✗ files.sha256" in ran.out
    assert "model/model.safetensors" in ran.out
    assert ran.err.splitlines()[-1].startswith("error: [verify-failed] model/model.safetensors")
    found = quantkit("verify", bundle, "--json").envelope
    assert found["error"]["code"] == "verify-failed"
    assert [check["name"] for check in found["result"]["checks"] if not check["ok"]] == ["files.sha256"]


def test_a_bundle_is_sealed_signed_and_known_again(quantkit: Any, bundle: Path, tmp_path: Path) -> None:
    seal.write_manifest(bundle, (bundle / "manifest.json").read_bytes())
    key = tmp_path / "ada"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    signed = quantkit("sign", bundle, "--key", key, "--json").envelope["result"]
    assert signed["signature"] == "seal.json.sig"
    ran = quantkit("verify", bundle, "--signer", f"{key}.pub", "--expect", signed["seal"][:20])
    assert "signed by      ada" in ran.out and f"seal           {signed['seal']}" in ran.out
    for arguments, code in (
        (("verify", bundle, "--expect", "0" * 64), "seal-differs"),
        (("verify", bundle, "--signer", "nobody@example.org"), "signature-missing"),
        (("sign", bundle), "usage"),
    ):
        assert quantkit(*arguments, "--json").envelope["error"]["code"] == code
    (bundle / "seal.json.sig").unlink()
    assert quantkit("verify", bundle, "--signer", f"{key}.pub").code == 1
