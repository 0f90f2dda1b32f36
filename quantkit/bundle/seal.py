"""`seal.json`: the sha256 of the manifest, which holds the sha256 of everything else; and the signatures of it.

    {"schema": 1, "manifest.json": "<sha256>"}

The manifest holds the verdict, checks, decisions and source. To edit it unnoticed, one has to edit the seal too; the
seal then differs from the published hash (`quantkit verify --expect HASH`), and no signature fits:

    seal.json.sig    signature of `seal.json` by an SSH key (PROTOCOL.sshsig; `ssh-keygen -Y`, namespace `quantkit`)
    model.sig        signature of the whole folder by an elliptic-curve key or a Sigstore identity (model-signing)
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle.disk import sha256, write_atomic
from quantkit.bundle.manifest import MANIFEST, SEAL, SIGNED_BY_KEY, SIGNED_BY_LIBRARY
from quantkit.errors import GateError, InputError, MissingDependency

_NAMESPACE = "quantkit"
# beginnings of a line with a public key, and the name of a key that has none
_PUBLIC = re.compile(r"(ssh-[a-z0-9@.-]+|ecdsa-[a-z0-9@.-]+|sk-[a-z0-9@.-]+) AAAA")
_ANYBODY = "signer"
# key of the seal for the previous hash, while the manifest is being replaced
_BEFORE = "before"


def write_manifest(folder: Path, data: bytes) -> None:
    """Replace the manifest and its seal; if the process is killed at any moment, the two still match.

    While the manifest is replaced, the seal holds both hashes, old and new.
    """
    digest = hashlib.sha256(data).hexdigest()
    if (folder / MANIFEST).is_file():
        both = {"schema": 1, MANIFEST: digest, _BEFORE: hash_of(folder)}
        write_atomic(folder / SEAL, (json.dumps(both) + "\n").encode())
    write_atomic(folder / MANIFEST, data)
    write_atomic(folder / SEAL, _sealed(digest))


def hash_of(folder: Path) -> str:
    """Return the bundle's hash: the sha256 of its manifest."""
    return sha256(folder / MANIFEST)


def is_broken(folder: Path) -> bool:
    """Tell whether a seal exists and does not match the manifest; older bundles have no seal."""
    try:
        seal = json.loads(limits.read(folder / SEAL))
        return hash_of(folder) not in (seal[MANIFEST], seal.get(_BEFORE))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError):
        return True


def demand(folder: Path, expected: str) -> None:
    """Refuse a bundle if its hash is not the published one.

    Args:
        folder: folder of the bundle.
        expected: published hash, or at least its first 16 digits.

    Raises:
        InputError: `usage`, too few digits. GateError: `seal-differs`.
    """
    if len(expected) < 16:
        raise InputError("usage", "--expect", expected, "the hash, or at least its first 16 digits")
    actual = hash_of(folder)
    if not actual.startswith(expected.lower()):
        remedy = "fetch the bundle again from where the hash was announced"
        raise GateError("seal-differs", str(folder), actual, f"it is {expected}", remedy)


def sign(folder: Path, key: Path | None) -> Path:
    """Sign a bundle.

    Args:
        folder: folder of a bundle that verifies.
        key: private SSH key, or elliptic-curve key in PEM. None uses a Sigstore identity (browser, build service).

    Returns:
        path of the signature, in the bundle.

    Raises:
        InputError: `key-unusable`. GateError: `seal-differs`. MissingDependency: model-signing.
    """
    if is_broken(folder) or not (folder / SEAL).is_file():
        raise GateError("seal-differs", str(folder), "the manifest is not the sealed one")
    # the signed seal names one manifest: a killed write may have left the hash of the previous one in it
    write_atomic(folder / SEAL, _sealed(hash_of(folder)))
    if key is not None and b"OPENSSH PRIVATE KEY" in _content(key):
        signature = _ssh_keygen(
            "-Y", "sign", "-f", str(key), "-n", _NAMESPACE, where=str(key), stdin=_content(folder / SEAL)
        )
        if not signature.startswith(b"-----BEGIN SSH SIGNATURE"):
            raise _unusable(str(key), "ssh-keygen gave no signature")
        write_atomic(folder / SIGNED_BY_KEY, signature)
        return folder / SIGNED_BY_KEY
    hashing, signing, _ = _model_signing()
    config = signing.Config().set_hashing_config(_all_but_signatures(hashing))
    try:
        signer = config.use_sigstore_signer() if key is None else config.use_elliptic_key_signer(private_key=key)
        signer.sign(folder, folder / SIGNED_BY_LIBRARY)
    except Exception as problem:  # a wrong key can raise anything in a cryptography library
        raise _unusable(str(key or "Sigstore"), str(problem)) from None
    return folder / SIGNED_BY_LIBRARY


def demand_signer(folder: Path, signer: str, issuer: str | None = None) -> str:
    """Refuse a bundle without a valid signature of this signer.

    Args:
        folder: folder of the bundle.
        signer: file with a public key (SSH, `allowed_signers` or elliptic-curve PEM); else a Sigstore identity.
        issuer: issuer of that identity: https://accounts.google.com, https://github.com/login/oauth.

    Returns:
        description of the signer, for the reader.

    Raises:
        GateError: `signature-missing`, `signature-differs`. InputError: `usage`. MissingDependency: model-signing.
    """
    key = Path(signer).expanduser()
    by_ssh = key.is_file() and b"-----BEGIN" not in _content(key)
    signature = folder / (SIGNED_BY_KEY if by_ssh else SIGNED_BY_LIBRARY)
    if not signature.is_file():
        raise GateError(
            "signature-missing", str(folder), f"no {signature.name} in it", remedy="ask its publisher for it"
        )
    if not (folder / SEAL).exists():
        raise _differs(folder, "there is no seal")
    if _content(folder / SEAL) != _sealed(hash_of(folder)):
        raise _differs(folder, "the seal is not that of the manifest alone")
    if by_ssh:
        return _ssh_signer(folder, key, signature.resolve())
    hashing, _, verifying = _model_signing()
    config = verifying.Config().set_hashing_config(_all_but_signatures(hashing))
    if not key.is_file() and not issuer:
        raise InputError("usage", "--signer", signer, "no such file; give --issuer with a Sigstore identity")
    try:
        if key.is_file():
            config.use_elliptic_key_verifier(public_key=key).verify(folder, signature)
        else:
            config.use_sigstore_verifier(identity=signer, oidc_issuer=issuer).verify(folder, signature)
    except Exception as problem:
        raise _differs(folder, str(problem)) from None
    return signer


def _ssh_signer(folder: Path, key: Path, signature: Path) -> str:
    """Return the signer in an OpenSSH file whose key made the signature."""
    lines = [line.strip() for line in _content(key).decode("utf-8-sig", errors="replace").splitlines()]
    lines = [line for line in lines if line and line[0] != "#"]
    # a line of a public key begins with the kind of key; a line of `allowed_signers` with the signer's name
    bare = [_PUBLIC.match(line) is not None for line in lines]
    if any(bare):
        lines = [f"{_ANYBODY} {line}" for line, is_bare in zip(lines, bare, strict=True) if is_bare]
    with tempfile.TemporaryDirectory() as place:
        allowed = Path(place) / "allowed_signers"
        allowed.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            names = _ssh_keygen("-Y", "find-principals", "-f", str(allowed), "-s", str(signature), where=str(signature))
            who = names.decode(errors="replace").splitlines()[0]
            arguments = ("-Y", "verify", "-f", str(allowed), "-I", who, "-n", _NAMESPACE, "-s", str(signature))
            _ssh_keygen(*arguments, where=str(signature), stdin=_content(folder / SEAL))
        except (InputError, IndexError) as error:
            reason = error.value if isinstance(error, InputError) else "the signer is not in the file of signers"
            raise _differs(folder, reason) from None
    return key.stem if who == _ANYBODY else who


def _sealed(digest: str) -> bytes:
    return (json.dumps({"schema": 1, MANIFEST: digest}) + "\n").encode()


def _ssh_keygen(*arguments: str, where: str, stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(["ssh-keygen", *arguments], input=stdin, capture_output=True, check=False)  # noqa: S603, S607
    except FileNotFoundError:
        raise MissingDependency("ssh-keygen", extra=None, purpose="a signature of an SSH key") from None
    if done.returncode:
        output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise _unusable(where, output[-1] if output else f"ssh-keygen ended with {done.returncode}")
    return done.stdout


def _model_signing() -> tuple[Any, Any, Any]:
    try:
        from model_signing import hashing, signing, verifying
    except ImportError:
        raise MissingDependency("model-signing", extra="sign", purpose="a signature of a PEM key or Sigstore") from None
    return hashing, signing, verifying


def _all_but_signatures(hashing: Any) -> Any:
    return hashing.Config().set_ignored_paths(paths=[SIGNED_BY_KEY, SIGNED_BY_LIBRARY], ignore_git_paths=False)


def _content(key: Path) -> bytes:
    try:
        return limits.read(key)
    except OSError as problem:
        raise _unusable(str(key), problem.strerror or str(problem)) from None


def _unusable(where: str, value: str) -> InputError:
    rule = "a private key of SSH (ed25519), or of an elliptic curve in PEM"
    return InputError("key-unusable", where, value, rule, "ssh-keygen -t ed25519 -f ./key")


def _differs(folder: Path, value: str) -> GateError:
    rule = "the bundle is unchanged since the named signer signed it"
    remedy = "fetch it again, or ask the signer: later measurements and exports are not signed"
    return GateError("signature-differs", str(folder), value[:300], rule, remedy)
