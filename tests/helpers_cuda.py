"""CUDA's streams, events and graphs on a machine without a GPU: a recording keeps the operations that are started in
it, a replay starts them again and writes their results to the same places. What a GPU forbids inside a recording, or
what would make the host wait there, raises, as it does on a GPU."""
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.device import graphs
from specdec.device import loop as device_loop

# operations that need a number on the host, or bring one over from there
ASKING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "equal",
          "lift_fresh", "lift_fresh_copy", "multinomial", "bincount"}


class Capture(TorchDispatchMode):
    "Keeps what is started."
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if name in ASKING or name == "index" and masks:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        out = function(*args, **(kwargs or {}))
        self.graph.started.append((function, args, kwargs or {}, out))
        return out


def tensors(thing):
    "Those that lie in memory as they are (a packed weight has no storage of its own)."
    return [x for x in tree_leaves(thing) if isinstance(x, torch.Tensor) and x.layout == torch.strided]


class Graph:
    "Operations in order; what they gave has its place."
    def __init__(self): self.started, self.generators = [], []

    def register_generator_state(self, generator): self.generators.append(generator)

    def fresh(self):
        "The results that took memory of their own, made inside the recording."
        for _, args, kwargs, out in self.started:
            given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            yield from (x for x in tensors(out) if x.untyped_storage().data_ptr() not in given)

    def forget(self):
        "A recording computes nothing: its results are whatever was in memory."
        for x in self.fresh():
            if x.dtype == torch.bool: x.fill_(True)
            else: x.fill_(float("nan") if x.is_floating_point() else 10 ** 9)

    def replay(self):
        for function, args, kwargs, out in self.started:
            for place, value in zip(tensors(out), tensors(function(*args, **kwargs))):
                if place.data_ptr() != value.data_ptr(): place.copy_(value)


class FakeCuda:
    "What the loop asks of `torch.cuda`, with a log."
    def __init__(self):
        self.log, self.graphs, self.recording, self.fails = [], [], False, None

    def refuse(self, what):
        if self.recording: raise RuntimeError(f"CUDA error: {what} inside a recording")

    @contextmanager
    def graph(self, graph):
        if self.fails: raise RuntimeError(self.fails)
        self.recording = True
        self.graphs.append(graph)
        try:
            with Capture(graph): yield
        finally: self.recording = False
        graph.forget()

    def pinned(self, like):
        self.refuse("memory of the host's was asked for")
        return torch.empty(like.shape, dtype=like.dtype)

    def wait(self, what="synchronize"):
        self.refuse("a wait")
        self.log.append("waited")

    def event(self, **options):
        def record(stream=None): self.log.append("sent")
        return type("Event", (), dict(record=staticmethod(record), synchronize=staticmethod(self.wait)))()

    def stream(self): return type("Stream", (), dict(wait_stream=lambda self, other: None, synchronize=self.wait))()

    def install(self, monkeypatch):
        for module in (graphs, device_loop): monkeypatch.setattr(module, "is_capturable", lambda device: True)
        monkeypatch.setattr(graphs, "pinned", self.pinned)
        current = self.stream()
        fakes = dict(
            CUDAGraph=Graph, graph=self.graph, Event=self.event, Stream=self.stream, synchronize=self.wait,
            current_stream=lambda device=None: current, stream=lambda stream: nullcontext(),
            device=lambda device: nullcontext(),
        )
        for name, fake in fakes.items(): monkeypatch.setattr(torch.cuda, name, fake)
        return self
