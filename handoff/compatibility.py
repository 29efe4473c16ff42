"""Whether two nodes may hand KV to each other: which fields are equal, and a refusal names those that aren't.

Nodes that are equal exchange blocks as they are; what may differ between others is in relayout/check.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

from scheduler.contract import DeviceFacts

LAYOUT = "block,layer,kv,head,token,dim"


class IncompatiblePeer(RuntimeError):
    """These two nodes can't exchange KV. Start them with the same settings; the message says which differ."""

    @classmethod
    def because(cls, peer: str, reasons: Sequence[str]) -> "IncompatiblePeer":
        return cls(f"{peer} can't exchange KV with this node: {'; '.join(reasons)}")


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What both sides of a handoff must agree on before any byte moves.

    protocol: version of the wire format. kv_heads: of the whole model. ranks: its tensor-parallel degree.
    """

    protocol: int
    model_digest: str
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    slot_bytes: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, facts: DeviceFacts, protocol: int, ranks: int = 1) -> "Compatibility":
        return cls(
            protocol=protocol,
            model_digest=facts.model_digest,
            dtype=facts.dtype,
            layout=LAYOUT,
            layers=facts.layers,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            block_size=facts.block_size,
            slot_bytes=facts.slot_bytes,
            ranks=ranks,
        )

    def digest(self) -> str:
        return blake2b(repr(asdict(self)).encode(), digest_size=16).hexdigest()

    def differing(self, other: "Compatibility") -> list[str]:
        """Names of the fields that are not equal."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != theirs[name]]

    def require_equal(self, other: "Compatibility", peer: str) -> None:
        """Raises IncompatiblePeer, naming each field that differs."""
        reasons = [
            f"{name} is {getattr(self, name)} here and {getattr(other, name)} there" for name in self.differing(other)
        ]
        if reasons:
            raise IncompatiblePeer.because(peer, reasons)
