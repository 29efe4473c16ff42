"""Whether two nodes may hand KV to each other: every field must be equal, and a refusal names those that aren't."""

from dataclasses import asdict, dataclass
from hashlib import blake2b

from scheduler.contract import DeviceFacts

LAYOUT = "block,layer,kv,head,token,dim"


class IncompatiblePeer(RuntimeError):
    """These two nodes can't exchange KV. Start them with the same settings; the message says which differ."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What both sides of a handoff must agree on before any byte moves. protocol: version of the wire format."""

    protocol: int
    model_digest: str
    dtype: str
    layout: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    slot_bytes: int = 0

    @classmethod
    def of(cls, facts: DeviceFacts, protocol: int) -> "Compatibility":
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
        )

    def digest(self) -> str:
        return blake2b(repr(asdict(self)).encode(), digest_size=16).hexdigest()

    def require_equal(self, other: "Compatibility", peer: str) -> None:
        """Raises IncompatiblePeer, naming each field that differs."""
        mine, theirs = asdict(self), asdict(other)
        differing = [
            f"{name} is {mine[name]} here and {theirs[name]} there" for name in mine if mine[name] != theirs[name]
        ]
        if differing:
            raise IncompatiblePeer(f"{peer} can't exchange KV with this node: {'; '.join(differing)}")
