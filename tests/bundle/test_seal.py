"""Who edits what a bundle says of itself is found out: by its seal, an announced hash, or a signature."""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_build import compile_fake

from quantkit.bundle import Bundle, seal
from quantkit.errors import InputError, QuantkitError


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return compile_fake(tmp_path / "bundle", resume=False)


def failed(bundle: Bundle) -> list[str]:
    return [check.name for check in Bundle.load(bundle.path).verify() if not check.ok]


def edit(bundle: Bundle, **changes: object) -> None:
    path = bundle.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_manifest_that_was_edited_is_not_the_sealed_one(bundle: Bundle) -> None:
    assert not failed(bundle) and json.loads((bundle.path / "seal.json").read_bytes())["schema"] == 1
    edit(bundle, state="gate_failed")
    assert failed(bundle) == ["seal"]


def test_what_is_put_is_sealed_too(bundle: Bundle) -> None:
    before = seal.hash_of(bundle.path)
    bundle.put("report.html", b"a page")
    assert not failed(bundle) and seal.hash_of(bundle.path) != before


def test_a_bundle_of_before_has_no_seal(bundle: Bundle) -> None:
    (bundle.path / "seal.json").unlink()
    assert not failed(bundle)
    (bundle.path / "seal.json").write_text("[]", encoding="utf-8")
    assert failed(bundle) == ["seal"]


def test_the_hash_that_was_announced_finds_an_edited_seal(bundle: Bundle) -> None:
    announced = seal.hash_of(bundle.path)
    seal.demand(bundle.path, announced)
    seal.demand(bundle.path, announced[:16].upper())
    seal.write_manifest(bundle.path, (bundle.path / "manifest.json").read_bytes().replace(b"complete", b"gate_failed"))
    assert not failed(bundle), "all of it fits together"
    with pytest.raises(QuantkitError, match="seal-differs"):
        seal.demand(bundle.path, announced)
    with pytest.raises(InputError, match="usage"):
        seal.demand(bundle.path, announced[:8])


def ssh_key(place: Path) -> tuple[Path, Path]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", place], check=True)
    return place, place.with_suffix(".pub")


def pem_key(place: Path) -> tuple[Path, Path]:
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    place.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    public = place.with_suffix(".pub")
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return place, public


@pytest.mark.parametrize("make", [ssh_key, pem_key], ids=["ssh", "pem"])
def test_a_signature_holds_until_something_changes(
    bundle: Bundle, tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]
) -> None:
    private, public = make(tmp_path / "mine")
    _, stranger = make(tmp_path / "other")
    with pytest.raises(QuantkitError, match="signature-missing"):
        seal.demand_signer(bundle.path, str(public))
    signature = seal.sign(bundle.path, private)
    assert not failed(bundle), "a signature is not an unlisted file"
    assert seal.demand_signer(bundle.path, str(public))
    with pytest.raises(QuantkitError, match="signature-differs"):
        seal.demand_signer(bundle.path, str(stranger))
    if make is ssh_key:
        allowed = tmp_path / "allowed_signers"
        allowed.write_text(f"# ours\nada@example.org {public.read_text(encoding='utf-8')}", encoding="utf-8")
        assert seal.demand_signer(bundle.path, str(allowed)) == "ada@example.org"
        # another program's word, not ours
        command = ["ssh-keygen", "-Y", "verify", "-f", allowed, "-I", "ada@example.org", "-n", "quantkit"]
        done = subprocess.run(
            [*command, "-s", signature], input=(bundle.path / "seal.json").read_bytes(), capture_output=True, check=True
        )
        assert b"Good" in done.stdout
    seal.write_manifest(bundle.path, (bundle.path / "manifest.json").read_bytes().replace(b"complete", b"gate_failed"))
    assert not failed(bundle)
    with pytest.raises(QuantkitError, match="signature-differs"):
        seal.demand_signer(bundle.path, str(public))


def test_a_missing_seal_is_called_so(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.path / seal.SEAL).unlink()
    (bundle.path / seal.SIGNED_BY_KEY).write_bytes(b"")
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA", encoding="utf-8")
    with pytest.raises(QuantkitError, match=r"signature-differs.*there is no seal"):
        seal.demand_signer(bundle.path, str(tmp_path / "key.pub"))


def test_a_file_without_a_private_key_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    for content in (b"", b"-----BEGIN OPENSSH PRIVATE KEY-----\nnothing\n", b"-----BEGIN EC PRIVATE KEY-----\nnone\n"):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(InputError, match="key-unusable"):
            seal.sign(bundle.path, tmp_path / "key")
    with pytest.raises(InputError, match="key-unusable"):
        seal.sign(bundle.path, tmp_path / "absent")
    edit(bundle, state="gate_failed")
    with pytest.raises(QuantkitError, match="seal-differs"):
        seal.sign(bundle.path, ssh_key(tmp_path / "mine")[0])


def test_a_signature_is_of_one_manifest(bundle: Bundle, tmp_path: Path) -> None:
    """A killed write, or a stranger, left the hash of another manifest in the seal that is signed."""
    private, public = ssh_key(tmp_path / "mine")
    honest = (bundle.path / "manifest.json").read_bytes()
    hostile = honest.replace(b"complete", b"gate_failed")
    said = json.loads((bundle.path / "seal.json").read_bytes())
    both = {**said, "before": hashlib.sha256(hostile).hexdigest()}
    (bundle.path / "seal.json").write_text(json.dumps(both), encoding="utf-8")
    assert not failed(bundle)
    seal.sign(bundle.path, private)
    (bundle.path / "manifest.json").write_bytes(hostile)
    assert failed(bundle) == ["seal"]
    with pytest.raises(QuantkitError, match="signature-differs"):
        seal.demand_signer(bundle.path, str(public))


def test_what_changed_is_signed_again(bundle: Bundle, tmp_path: Path) -> None:
    private, public = ssh_key(tmp_path / "my key")
    seal.sign(bundle.path, private)
    bundle.put("report.html", b"a page")
    with pytest.raises(QuantkitError, match="signature-differs"):
        seal.demand_signer(bundle.path, str(public))
    seal.sign(bundle.path, private)
    assert seal.demand_signer(bundle.path, str(public)) == "my key"


def test_signers_are_found_as_openssh_finds_them(bundle: Bundle, tmp_path: Path) -> None:
    _, other = ssh_key(tmp_path / "other")
    private, public = ssh_key(tmp_path / "mine")
    seal.sign(bundle.path, private)
    both = tmp_path / "keys"
    both.write_text(other.read_text(encoding="utf-8") + public.read_text(encoding="utf-8"), encoding="utf-8")
    assert seal.demand_signer(bundle.path, str(both)) == "keys"
    key = public.read_text(encoding="utf-8")
    for line in (f"ada@x,bob@x {key}", f'"ada love" {key}', f'\ufeff  ssh-admin@x namespaces="quantkit" {key}'):
        both.write_text(line, encoding="utf-8")
        assert seal.demand_signer(bundle.path, str(both))
    both.write_text(f'ada@x namespaces="git" {key}', encoding="utf-8")
    with pytest.raises(QuantkitError, match="signature-differs"):
        seal.demand_signer(bundle.path, str(both))


def test_a_pipe_is_no_seal(bundle: Bundle, tmp_path: Path) -> None:
    private, public = ssh_key(tmp_path / "mine")
    seal.sign(bundle.path, private)
    (bundle.path / "seal.json").unlink()
    os.mkfifo(bundle.path / "seal.json")
    with pytest.raises(QuantkitError, match="not-a-file"):
        seal.demand_signer(bundle.path, str(public))
