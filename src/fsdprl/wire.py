"""Messages between the controller and the ranks: ZMQ ROUTER/DEALER, msgspec msgpack, no pickle.

The controller's message is token, seq, training step, verb and payload; a rank's reply token, seq, seconds and value.
A message without this run's token, or from an unknown identity, is dropped and counted.
torch is imported only where a tensor is met: the wire itself must come up fast.
"""

import hashlib
import hmac
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

TOKEN_BYTES = 16
TENSOR, ARRAY = 1, 2
"""msgpack extension types; their data is msgpack (dtype, shape, raw bytes)."""

DTYPES = set(
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()  # noqa: SIM905
)
_REQUEST = struct.Struct(f"<{TOKEN_BYTES}sQQ40p")
_REPLY = struct.Struct(f"<{TOKEN_BYTES}sQd")
_LINGER_MS = 2000
_MORE, _NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)


def encode(value: Any) -> bytes:
    """msgpack bytes. Tensors (moved to CPU) and numpy arrays keep dtype and shape; tuples become lists.

    Raises TypeError for anything else that is not plain data.
    """
    return _ENCODER.encode(value)


def decode(data: bytes | memoryview) -> Any:
    """The inverse of encode. Tensors and arrays own their memory and are writable."""
    return _DECODER.decode(data)


def _encode_other(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode((name, tuple(value.shape), raw)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        fields = (value.dtype.name, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(fields))
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"a {type(value).__qualname__} cannot travel between ranks")


def _decode_ext(code: int, data: memoryview) -> Any:
    dtype, shape, raw = msgspec.msgpack.decode(data)
    if code not in (TENSOR, ARRAY) or dtype not in DTYPES:
        raise ValueError(f"extension {code} with dtype {dtype!r} is not ours")
    if code == ARRAY:
        import numpy

        return numpy.frombuffer(bytearray(raw), dtype).reshape(shape)
    import torch

    kind = getattr(torch, dtype)
    if not raw:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(bytearray(raw), dtype=kind)
    return flat if len(shape) == 1 else flat.reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_decode_ext)


def _identity(token: bytes, rank: int) -> bytes:
    """A rank's ZMQ identity: only who knows the token can take it. May not begin with a zero byte."""
    return b"r" + hashlib.blake2b(struct.pack("<q", rank), key=token, digest_size=8).digest()


def _socket(kind: int, context: zmq.Context | None = None) -> zmq.Socket:
    socket = (context or zmq.Context()).socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    return socket


class Wire:
    """The controller's end. Used from one thread."""

    def __init__(self, address: str, token: bytes, size: int) -> None:
        """Bind a free port of `address` for `size` ranks."""
        self.token = token
        self.socket = _socket(zmq.ROUTER)
        self.socket.set(zmq.BACKLOG, 4096)
        self.socket.bind(f"tcp://{address}:*")
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.identities = [_identity(token, rank) for rank in range(size)]
        self._ranks = {identity: rank for rank, identity in enumerate(self.identities)}
        self.sent = self.received = self.dropped = 0
        """Bytes of messages sent and received; messages dropped for a wrong token or sender."""

    def send(
        self, ranks: Sequence[int], seq: int, verb: str, bodies: Sequence[bytes], *, step: int = 0
    ) -> int:
        """Send a verb (at most 39 bytes) to each rank; returns the bytes. step: under way."""
        assert len(verb) < 40, verb
        head = _REQUEST.pack(self.token, seq, step, verb.encode())
        amount, last, message = 0, None, b""
        for rank, body in zip(ranks, bodies, strict=True):
            if body is not last:
                last, message = body, head + body
            self.socket.send(self.identities[rank], _MORE)
            self.socket.send(message)
            amount += len(message)
        self.sent += amount
        return amount

    def receive(self) -> tuple[int, int, float, memoryview] | None:
        """(rank, seq, seconds the verb took, encoded value) of one waiting reply; None if none waits."""
        while True:
            try:
                identity = self.socket.recv(_NOBLOCK)
            except zmq.Again:
                return None
            message = self.socket.recv()
            rank = self._ranks.get(identity)
            more = self.socket.getsockopt(zmq.RCVMORE)
            while more and self.socket.getsockopt(zmq.RCVMORE):
                self.socket.recv()
            if rank is None or more or not _admitted(message, self.token, _REPLY.size):
                self.dropped += 1
                continue
            self.received += len(message)
            _, seq, seconds = _REPLY.unpack_from(message)
            return rank, seq, seconds, memoryview(message)[_REPLY.size :]

    def close(self) -> None:
        self.socket.close()


class Line:
    """A rank's end. Used from one thread."""

    def __init__(
        self, endpoint: str, token: bytes, rank: int, context: zmq.Context | None = None
    ) -> None:
        """context: to share among many lines of one process; its own (with a thread) otherwise."""
        self.token = token
        self.dropped = 0
        self.step = 0
        """The training step that the last verb received belongs to."""
        self.socket = _socket(zmq.DEALER, context)
        self.socket.set(zmq.IDENTITY, _identity(token, rank))
        self.socket.connect(endpoint)

    def receive(self) -> tuple[int, str, memoryview]:
        """Block for the next (seq, verb, encoded payload)."""
        while True:
            frames = self.socket.recv_multipart()
            if len(frames) == 1 and _admitted(frames[0], self.token, _REQUEST.size):
                _, seq, self.step, verb = _REQUEST.unpack_from(frames[0])
                return seq, verb.decode(), memoryview(frames[0])[_REQUEST.size :]
            self.dropped += 1

    def reply(self, seq: int, seconds: float, body: bytes) -> None:
        """Answer the verb `seq` with an encoded value."""
        self.socket.send(_REPLY.pack(self.token, seq, seconds) + body)

    def close(self) -> None:
        """Let the last reply out, then close."""
        context = self.socket.context
        self.socket.close(linger=_LINGER_MS)
        context.term()


def _admitted(message: bytes, token: bytes, head: int) -> bool:
    return len(message) >= head and hmac.compare_digest(message[:TOKEN_BYTES], token)
