"""Tensors of the simulated device: they say "cuda", hold a tensor of the CPU, and report operations to the device."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_gpu.device import Block, SimulatedGpu

CPU = torch.device("cpu")
# Operations that launch nothing: views, and memory that is not initialised.
LAUNCHES_NOTHING = {
    "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand",
    "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "_reshape_alias", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "_unsafe_view", "unsqueeze", "view",
    "view_as_complex", "view_as_real",
}  # fmt: skip
# Operations whose result the host has to wait for.
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}


class DeviceTensor(Tensor):
    """A tensor of the simulated device: `plain` has its values, `block` its memory."""

    plain: Any
    block: Any

    @staticmethod
    def __new__(cls: "type[DeviceTensor]", inner: Tensor, block: Block) -> "DeviceTensor":
        """Wrap a tensor of the CPU."""
        wrapped = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CPU,
            requires_grad=False,
        )
        wrapped.plain, wrapped.block = inner, block
        return wrapped

    @property
    def device(self) -> torch.device:
        """The device of its memory."""
        return self.block.stream.device

    @property
    def is_cuda(self) -> bool:
        """Always."""
        return True

    def _set_data(self, other: "DeviceTensor") -> None:
        self.plain, self.block = other.plain, other.block

    data = property(lambda self: self, _set_data)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        """Copy to the host and wait."""
        return self.to("cpu")

    def tolist(self) -> Any:
        """Copy to the host and wait."""
        return self.to("cpu").tolist()

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until this stream is done with it."""
        self.block.recorded.add(stream.number)

    def to(self, *args: Any, **options: Any) -> Tensor:
        """Copy to another device or type. `Tensor.to` would take the wrapper for a tensor of the CPU."""
        places = [each for each in (*args, *options.values()) if isinstance(each, str | torch.device)]
        if places and torch.device(places[0]).type == "cpu":
            copied = torch.empty(self.shape, dtype=self.dtype)
            copied.copy_(self, non_blocking=options.get("non_blocking", False))
            kinds = [each for each in (*args, *options.values()) if isinstance(each, torch.dtype)]
            return copied.to(kinds[0]) if kinds else copied
        left = [each for each in args if not isinstance(each, str | torch.device)]
        options.pop("device", None)
        return Tensor.to(self, *left, **options) if left or options.keys() - {"non_blocking"} else self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the device of its first tensor."""
        gpu = next(each.block.gpu for each in _device_tensors((args, kwargs)))
        return _run(gpu, func, args, kwargs or {})


class OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active on a thread, operations that create tensors with `device="cuda"` create them on the device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        return _run(self._gpu, func, args, kwargs or {})


def kernel(
    gpu: SimulatedGpu,
    name: str,
    compute: Callable[..., Any],
    tensors: Sequence[Any],
    writes: Iterable[int] = (),
) -> Any:
    """Launch a kernel from outside of torch over `tensors`; `compute` gets their inner ones and returns the outputs.

    `writes` are the places of the tensors that it writes itself.
    """
    inner = [_inner(each) for each in tensors]
    for each in tensors:
        if isinstance(each, Tensor) and not isinstance(each, DeviceTensor):
            gpu.finds(f"devices: {name} takes a tensor of the CPU")
    with torch._C._DisableTorchDispatch():
        made = compute(*inner)

    def again() -> None:
        with torch._C._DisableTorchDispatch():
            for old, new in zip(tree_leaves(made), tree_leaves(compute(*inner)), strict=True):
                old.copy_(new)

    written = [tensors[place].block for place in writes]
    outputs = _wrapped(gpu, made, tensors)
    gpu.launch(
        name,
        [each.block for each in _device_tensors(tensors)],
        [*written, *(each.block for each in _device_tensors(outputs))],
        again if made is not None else lambda: compute(*inner),
    )
    return outputs


def over_address(gpu: SimulatedGpu) -> Any:
    """Return `torch.as_tensor`, which wraps memory of the device by its address: here, an address on the host."""
    as_tensor = torch.as_tensor

    def wrap(values: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if not hasattr(values, "__cuda_array_interface__"):
            return as_tensor(values, *args, device=device, **options)
        if device is None:
            gpu.finds("devices: torch asks CUDA which device has the memory")
            device = "cuda"
        described = values.__cuda_array_interface__
        memory = (ctypes.c_uint8 * described["shape"][0]).from_address(described["data"][0])
        return _placed(gpu, torch.frombuffer(memory, dtype=torch.uint8), device)

    return wrap


def _run(gpu: SimulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with OnDevice(gpu):
            return func.decompose(*args, **kwargs)
    name, ours = func._schema.name.split("::")[1], _device_tensors((args, kwargs))
    place = kwargs.get("device")
    to_device = place is not None and torch.device(place).type == "cuda"
    if ours or to_device:
        if name in ("_to_copy", "copy_"):
            return _copy(gpu, func, name, args, kwargs, to_device)
        return _compute(gpu, func, name, args, kwargs, ours)
    if name not in LAUNCHES_NOTHING and not func.is_view:
        for each in _host_tensors((args, kwargs)):
            gpu.read_by_host(each, name)
        for each in _mutated(func, args, kwargs, _host_tensors):
            gpu.written_by_host(each, name)
    return func(*args, **kwargs)


def _compute(
    gpu: SimulatedGpu, func: Any, name: str, args: Any, kwargs: Any, ours: Sequence[DeviceTensor]
) -> Any:
    """Run an operation of the device."""
    for each in _host_tensors((args, kwargs)):  # torch passes the number in a tensor without dimensions
        gpu.read_by_host(each, name)
        if each.dim() and each.numel():
            gpu.finds(f"devices: {name} takes a tensor of the CPU of shape {tuple(each.shape)}")
    plain_args, plain = tree_map(_inner, args), _on_cpu(kwargs)
    if name in WAITS:
        gpu.launch(name, [each.block for each in ours], [])
        gpu.waits(name, gpu.host.stream.clock)
        return _wrapped(gpu, func(*plain_args, **plain), ours)
    made = func(*plain_args, **plain)
    outputs = _wrapped(gpu, made, ours)
    if name in LAUNCHES_NOTHING or func.is_view:
        return outputs

    def again() -> None:
        with torch._C._DisableTorchDispatch():
            for old, new in zip(tree_leaves(made), tree_leaves(func(*plain_args, **plain)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    written = [*_mutated(func, args, kwargs), *_device_tensors(outputs)]
    gpu.launch(name, [each.block for each in ours], [each.block for each in written], again)
    return outputs


def _copy(gpu: SimulatedGpu, func: Any, name: str, args: Any, kwargs: Any, to_device: bool) -> Any:
    """Run a copy between host and device or on the device, or a conversion."""
    source = args[1] if name == "copy_" else args[0]
    waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    place = kwargs.get("device")
    # torch itself takes the wrapper for a tensor of the CPU, so the place of a conversion is no copy to the host.
    lands = isinstance(args[0], DeviceTensor) or to_device
    options = _on_cpu(kwargs)
    options.pop("non_blocking", None)
    inner = [_inner(each) for each in args[:2]]
    if not isinstance(source, DeviceTensor):  # to the device
        gpu.read_by_host(source, name)
        gpu.copies_host(source)
        gpu.refuse_in_capture("a copy from the host")
        if source.numel() and not (gpu.is_pinned(source) and not waits):
            gpu.waits("a copy from memory that is not pinned", gpu.host.stream.clock)
        made = func(*inner, **options)
        copied = args[0] if name == "copy_" else _placed(gpu, made, place)
        gpu.launch("copy to device", [], [copied.block])
        if not waits:
            gpu.leaves(source)
        return copied
    if not lands:
        gpu.copies_host(args[0])
        func(*inner, **options)
        gpu.launch("copy to host", [source.block], [])
        if waits:
            gpu.waits("a copy to the host", gpu.host.stream.clock)
        else:
            gpu.arrives(args[0])
        return args[0]
    made = func(*inner, **options)
    copied = args[0] if name == "copy_" else _wrapped(gpu, made, [])

    def again() -> None:
        with torch._C._DisableTorchDispatch():
            made.copy_(inner[-1])

    gpu.launch("copy", [source.block], [copied.block], again)
    return copied


def _placed(gpu: SimulatedGpu, made: Tensor, place: Any) -> DeviceTensor:
    index = torch.device(place).index
    stream = gpu.host.stream
    if index is not None and index != stream.device_index:
        stream = gpu.default_streams[index]
    return DeviceTensor(made, Block(gpu, stream))


def _wrapped(gpu: SimulatedGpu, made: Any, inputs: Iterable[Any]) -> Any:
    """Wrap results. Those in the memory of an input share its block; an input itself stays the same object."""
    known = list(_device_tensors(inputs))
    same = {id(each.plain): each for each in known}
    blocks = {each.plain.untyped_storage()._cdata: each.block for each in known}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return value
        if id(value) in same:
            return same[id(value)]
        key = value.untyped_storage()._cdata
        if key not in blocks:
            blocks[key] = Block(gpu, gpu.host.stream)
        return DeviceTensor(value, blocks[key])

    return tree_map(wrap, made)


def _mutated(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors_of: Callable[[Any], list[Any]] | None = None,
) -> list[Any]:
    """Return the tensors that an operation writes, by its schema; those of the device, or those of `tensors_of`."""
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            written += (tensors_of or _device_tensors)(value)
    return written


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operation on the inner tensors."""
    plain: dict[str, Any] = tree_map(_inner, kwargs)
    if plain.get("device") is not None:
        plain["device"] = CPU
    plain.pop("pin_memory", None)
    return plain


def _device_tensors(values: Any) -> list[DeviceTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, DeviceTensor)]


def _host_tensors(values: Any) -> list[Tensor]:
    leaves = tree_leaves(values)
    return [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, DeviceTensor)]


def _inner(value: Any) -> Any:
    return value.plain if isinstance(value, DeviceTensor) else value
