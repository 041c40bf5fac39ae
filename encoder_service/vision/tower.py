"""A loaded vision tower: uint8 patches of any number of images in, their rows out, within bounded memory.

Tables that depend only on an image's grid (position embeddings, rotary angles, window order) are cached by grid.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from cachetools import LRUCache, cached
from torch import Tensor

from encoder_contract.geometry import Geometry, Grid
from encoder_contract.tower_spec import TowerSpec
from encoder_service.image.resize import Resize, to_patches
from encoder_service.keys import Recipe
from encoder_service.vision.graphs import CudaCapture, Graphs, budgets
from encoder_service.vision.layers import Attention, PackedBatch, Segments, to_device
from encoder_service.vision.pointwise import Pointwise, patch_coordinates
from encoder_service.vision.qwen import TowerModule, in_order
from encoder_service.vision.ulysses import MIN_PATCHES, UlyssesAttention, UlyssesGroup, even_shares

# In bfloat16 the tables of Qwen3-VL take 2.6 KB a patch (its position embedding and its rotation). On the CPU that is
# at most 170 MB, for eighteen different 720p grids. On a GPU it is 1.7 GB, because making the tables of a grid
# costs more there than a forward.
MAX_TABLE_PATCHES = {"cpu": 65536, "cuda": 655360}


MIN_BATCH_AHEAD = 16384  # patches, which take 25 MB


@dataclass(frozen=True, slots=True)
class GridTables:
    """Tables of one grid, on the device, with patches in the order in which the tower processes them.

    `rotations` [patches, ...] is what `Pointwise.rotate` needs for each patch. `position` [patches, embed] or None is
    added to the embeddings of the patches. `order` [rows] or None has the merged row at each position in processing
    order, window by window; `inverse` undoes it. `windows` has the number of patches in each window. On CUDA, the event
    `made` fires when the tables are ready, because another stream makes them than uses them.
    """

    grid: Grid
    rotations: Tensor
    position: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    windows: tuple[int, ...] = ()
    made: "torch.cuda.Event | None" = None

    @property
    def size_bytes(self) -> int:
        """The size of the tables on the device, bytes."""
        tables = (self.rotations, self.position, self.order, self.inverse)
        return sum(table.nbytes for table in tables if table is not None)

    def on_current_stream(self) -> "GridTables":
        """Make the current stream wait until the tables are ready and keep their memory while it works; return them."""
        if self.made is not None:
            stream = torch.cuda.current_stream(self.rotations.device)
            stream.wait_event(self.made)
            for table in (self.rotations, self.position, self.order, self.inverse):
                if table is not None:
                    table.record_stream(stream)
        return self


def cached_by_grid(make: Callable[[Grid], GridTables], max_patches: int) -> Callable[[Grid], GridTables]:
    """Return `make` with a cache of the tables of recent grids, bounded by their patches. Thread-safe.

    If two threads need the same grid at once, both may make its tables. The cache keeps those of the first.
    """
    tables: LRUCache[Grid, GridTables] = LRUCache(max_patches, lambda made: made.grid.patches)
    return cached(tables, lock=threading.Lock())(make)


def make_tables(
    grid: Grid, spec: TowerSpec, learned: Tensor | None, rotations: Tensor, device: torch.device
) -> GridTables:
    """Make the tables of `grid` on `device`.

    `learned` is the tower's position table, whose dtype `position` gets. `rotations` come from `Pointwise.rotations`.
    """
    position = order = inverse = None
    windows: tuple[int, ...] = ()
    if learned is not None:
        position = position_table(grid, spec, learned).to(learned.dtype)
    if spec.window:
        order, windows = window_order(grid, spec)
        rotations = rotations.view(len(order), spec.merge_unit, *rotations.shape[1:])[order].flatten(0, 1)
        order, inverse = to_device(order, device), to_device(order.argsort(), device)
    rotations = to_device(rotations, device)
    made = None
    if device.type == "cuda":
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
    return GridTables(grid, rotations, position, order, inverse, windows, made)


def position_table(grid: Grid, spec: TowerSpec, learned: Tensor) -> Tensor:
    """Resample the learned square table [side², embed] to the grid; return float32 [patches, embed].

    Bilinear with aligned corners, like `get_vision_interpolation_indices_and_weights` of `transformers`.
    """
    side = spec.position_side
    taps = []
    axes = patch_coordinates(grid, spec.merge_size, learned.device)
    for axis, size in zip(axes, (grid.h, grid.w), strict=True):
        source = axis.float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        fraction = source - low
        near = low.long().clamp(0, side - 1)
        far = (low.long() + 1).clamp(0, side - 1)
        taps.append(((near, 1 - fraction), (far, fraction)))
    total = torch.zeros(grid.patches, learned.shape[1], dtype=torch.float32, device=learned.device)
    for row, row_weight in taps[0]:
        for column, column_weight in taps[1]:
            total += learned[row * side + column].float() * (row_weight * column_weight)[:, None]
    return total


def window_order(grid: Grid, spec: TowerSpec) -> tuple[Tensor, tuple[int, ...]]:
    """Return the merged rows [rows] window by window, and the number of patches in each window.

    The windows are those of Qwen2.5-VL (`window` patches square, cut at the right and lower edge). Windows do not
    attend to each other, so their order is free. Windows of equal size are neighbours, so that attention has few dense
    batches.
    """
    step = spec.window // spec.merge_size
    rows, columns = grid.h // spec.merge_size, grid.w // spec.merge_size
    index = torch.arange(grid.t * rows * columns).view(grid.t, rows, columns)
    windows = [
        index[frame, top : top + step, left : left + step].reshape(-1)
        for frame in range(grid.t)
        for top in range(0, rows, step)
        for left in range(0, columns, step)
    ]
    windows.sort(key=len, reverse=True)
    return torch.cat(windows), tuple(len(window) * spec.merge_unit for window in windows)


def flops(spec: TowerSpec, grid: Grid) -> int:
    """Return the floating-point operations of one image: 2 for each multiplication with its addition.

    Counts what the model needs: all products and the attention. The patch convolution counts once, because its weights
    are summed over time for a still image. Attention counts inside windows where the model has windows. Padding and the
    operations between the products do not count.
    """
    patches, rows = grid.patches, grid.patches // spec.merge_unit
    embed = 2 * patches * spec.patch_values * spec.embed
    products = 2 * patches * spec.embed * (4 * spec.embed + spec.mlp_products * spec.intermediate)
    merged = spec.embed * spec.merge_unit
    mergers = 2 * rows * merged * (merged + spec.hidden) * (1 + spec.levels)
    return embed + spec.depth * products + mergers + _attention_flops(spec, grid)


def _attention_flops(spec: TowerSpec, grid: Grid) -> int:
    """Count two products (scores, mixing) for each pair of patches that attend to each other, over heads and blocks."""
    per_pair = 2 * 2 * spec.embed
    frame = grid.h * grid.w
    full = per_pair * grid.t * frame**2
    if not spec.window:
        return spec.depth * full
    full_blocks = len([number for number in spec.full_attention if number < spec.depth])
    windowed = per_pair * grid.t * _square_sum(grid.h, spec.window) * _square_sum(grid.w, spec.window)
    return full_blocks * full + (spec.depth - full_blocks) * windowed


def _square_sum(length: int, window: int) -> int:
    """Return the sum of the squares of the pieces that windows cut `length` into."""
    return (length // window) * window**2 + (length % window) ** 2


def activation_values(spec: TowerSpec) -> int:
    """Return an upper bound on the values per patch that a forward holds at a time.

    They are the residual, its norm, packed query, key and value, the attention's output, the inside of the MLP (twice
    when it is gated), the rows of every level, and a merger's input and inside.
    """
    inside = (spec.mlp_products - 1) * spec.intermediate
    return 7 * spec.embed + inside + spec.width // spec.merge_unit + 2 * spec.embed


# On the CPU, products and the operations after them process 256 patches at a time. The widest intermediate (2.2 MB in
# bfloat16) then stays in the second-level cache of the cores that share it.
CPU_TILE_PATCHES = 256


class Tower:
    """A vision tower that is ready to run on one device. `load_tower` creates it.

    One thread at a time may use it; other threads may call `prepare` and `inputs` at the same time. `graph_batches` and
    `eager_batches` count the batches so far, with and without a CUDA graph.
    """

    graph_batches = 0
    eager_batches = 0
    takes_frames = True

    def __init__(
        self,
        module: TowerModule,
        attention: Attention,
        pointwise: Pointwise,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_patches: int,
        graph_patches: int,
        image_by_image: bool,
        geometry: Geometry,
        resize: Resize,
        recipe: Recipe,
    ) -> None:
        self.spec = module.spec
        self.geometry = geometry
        self.recipe = recipe
        self._resize = resize
        self.device = device
        self.dtype = dtype
        self.batch_patches = batch_patches
        self._graph_patches = graph_patches
        self.image_by_image = image_by_image
        self._module = module
        self._attention = attention
        self._pointwise = pointwise
        self._tables = cached_by_grid(self._make_tables, MAX_TABLE_PATCHES[device.type])
        self._graphs: Graphs | None = None

    @property
    def model_type(self) -> str:
        """See `VisionModel`."""
        return self.spec.model_type

    @property
    def hidden(self) -> int:
        """The width of the language model."""
        return self.spec.hidden

    @property
    def levels(self) -> int:
        """The number of DeepStack levels in a row, beside its main part."""
        return self.spec.levels

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return self.spec.width

    @property
    def attention(self) -> str:
        """The name of the attention backend."""
        return self._attention.name

    @property
    def ahead_patches(self) -> int:
        """Two batches, one that waits and one that is filled; at least enough for small images to pass large ones."""
        return 2 * max(self.batch_patches, MIN_BATCH_AHEAD)

    @property
    def forward_bytes(self) -> int:
        """The most bytes that the forward of a batch, or of the largest image, takes beside the weights."""
        return self._largest_patches * activation_values(self.spec) * self.dtype.itemsize

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch takes outside of its forward: its patches before it, its rows after it."""
        # Of a pair of frames, the largest.
        patch_bytes = self.spec.temporal_patch_size * self.spec.patch_values
        row_bytes = -(-self.width * self.dtype.itemsize // self.spec.merge_unit)  # per patch
        return self._largest_patches * (patch_bytes + row_bytes)

    @property
    def _largest_patches(self) -> int:
        return max(self.batch_patches, self.geometry.max_pixels // self.geometry.patch_size**2)

    def flops(self, grid: Grid) -> int:
        """Return the floating-point operations of an image of this grid."""
        return flops(self.spec, grid)

    def inputs(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Cut decoded images, uint8 [H, W, 3], or pairs of frames, [2, H, W, 3], into patches; see `to_patches`."""
        return to_patches(pixels, grids, self._resize)

    def encode(
        self,
        patches: Sequence[Tensor],
        grids: Sequence[Grid],
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Encode images and return for each its rows [tokens, width] in `dtype` on `device`.

        `patches[i]` is uint8 [grids[i].patches, channels × patch × patch] in merge order, on any device; for two frames
        of a video, [grids[i].patches, channels × 2 × patch × patch]. Rows are in raster order of the merged grid.

        `batch_patches` bounds the activations for any number of images; a larger image runs alone. On the CPU, and with
        `image_by_image`, the bits of an image's rows depend on that image only. On the CPU a block takes long, so
        `between` is called before each tile of a block; it may encode other images. Raises `ValueError` for patches
        that do not fit their grid.
        """
        for image, grid in zip(patches, grids, strict=True):
            self._check(image, grid)
        rows: list[Tensor] = []
        with torch.inference_mode():
            for batch in self._batches(grids, [image.shape[1] for image in patches]):
                rows += self._encode_batch(patches[batch], grids[batch], between)
        return rows

    def can_encode_in_group(self, processes: int) -> bool:
        """Whether this many processes can encode a large image in a group: each of them needs heads and patches.

        With `image_by_image` they cannot, because on a GPU a group rounds differently.
        """
        return (
            processes <= min(self.spec.heads, MIN_PATCHES["cpu"] // CPU_TILE_PATCHES)
            and not self.image_by_image
        )

    def encode_in_group(
        self,
        group: UlyssesGroup,
        number: int,
        leader: int,
        grid: Grid,
        patches: Tensor | None,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Encode one still image in a group of processes, all of which call this with the same `number`.

        The process with rank `leader` passes the patches and gets the rows; the others pass None and get no rows. On
        the CPU each process has whole tiles, so that products have the same shapes as in `encode` and rows the same
        bits. Raises `RuntimeError` if another process fails or does not join in time.
        """
        is_cpu, merge, values = self.device.type == "cpu", self.spec.merge_unit, self.spec.patch_values
        shares = even_shares(grid.patches, group.size, CPU_TILE_PATCHES if is_cpu else merge)
        own_patches, is_leader = shares[group.rank], group.rank == leader
        begin = sum(shares[: group.rank])
        own = slice(begin, begin + own_patches)
        with torch.inference_mode(), group.joined(number):
            whole = self._layouts([grid])[0] if is_cpu else self._layout([grid])
            sent = [torch.empty(0, dtype=torch.uint8, device=self.device)] * group.size
            if patches is not None:
                sent = list(torch.split(in_order(patches.to(self.device), whole.order), shares))
            received = group.exchange(
                sent, [own_patches * values * (rank == leader) for rank in range(group.size)]
            )
            layout = replace(
                whole,
                rotations=whole.rotations[own],
                position=None if whole.position is None else whole.position[own],
                projected=None if whole.projected is None else whole.projected[own],
                order=None,
                inverse=None,
                attend=UlyssesAttention(self._attention, group, shares),
            )
            [rows] = self._module([received.view(-1, values)], [layout], between if is_cpu else lambda: None)
            sent = [rows if rank == leader else rows[:0] for rank in range(group.size)]
            gathered = group.exchange(sent, [count // merge * self.width * is_leader for count in shares])
            if not is_leader:
                return []
            self.eager_batches += 1
            gathered = gathered.view(-1, self.width)
            rows = gathered if whole.inverse is None else gathered[whole.inverse]
            group.complete(number)
            return [rows]

    def prepare(self, grid: Grid) -> None:
        """Make the tables of a grid ahead, on the current stream, so that `encode` need not wait for them."""
        with torch.inference_mode():
            self._tables(grid)

    def capture_graphs(self) -> None:
        """Capture CUDA graphs for batches, and for single images up to the largest patch budget."""
        with torch.inference_mode():
            example = self._layout([Grid(1, 16, 16)])
            capture = CudaCapture(self.device)
            persistent = self._attention.persistent
            wanted = budgets(self._graph_patches, self.batch_patches, persistent=persistent)
            self._graphs = Graphs(self._module, self.spec, example, self.dtype, wanted, capture)

    @property
    def table_bytes(self) -> int:
        """The most bytes of device memory that cached tables take, once there have been many grids."""
        grid = Grid(1, self.spec.merge_size, self.spec.merge_size)
        return MAX_TABLE_PATCHES[self.device.type] * -(-self._make_tables(grid).size_bytes // grid.patches)

    @property
    def padding_patches(self) -> int:
        """A counter of the padding patches that filled the shapes of graphs."""
        return self._graphs.padding_patches if self._graphs else 0

    def _encode_batch(
        self, patches: Sequence[Tensor], grids: Sequence[Grid], between: Callable[[], None]
    ) -> list[Tensor]:
        on_device = [image.to(self.device, non_blocking=True) for image in patches]
        if self.device.type == "cpu":
            # All images pass a block before the next block, so that its weights are read from memory once. Each image
            # has its own kernels, whose shapes depend only on its grid.
            self.eager_batches += 1
            return list(self._module(on_device, self._layouts(grids), between))
        layout = self._layout(grids)
        # Graphs are captured for still images only.
        is_still = on_device[0].shape[1] == self.spec.patch_values
        rows = self._graphs.run(on_device, layout) if self._graphs and is_still else None
        if rows is not None:
            self.graph_batches += 1
        else:
            self.eager_batches += 1
            [rows] = self._module([_concatenated(on_device)], [layout])
        return list(rows.split([grid.patches // self.spec.merge_unit for grid in grids]))

    def _batches(self, grids: Sequence[Grid], values: Sequence[int]) -> Iterator[slice]:
        """Yield the images of each batch. `values` is the size of their patches, which differs for frame pairs.

        Still images and frame pairs are in separate batches.
        """
        limit = 0 if self.image_by_image else self.batch_patches
        begin, patches = 0, 0
        for number, grid in enumerate(grids):
            differs = values[number] != values[begin]
            if number > begin and (patches + grid.patches > limit or differs):
                yield slice(begin, number)
                begin, patches = number, 0
            patches += grid.patches
        if grids:
            yield slice(begin, len(grids))

    def _layouts(self, grids: Sequence[Grid]) -> list[PackedBatch]:
        """Return one layout for each image. They share the memory that collects tiles for attention."""
        largest = max(grid.patches for grid in grids)
        shape = (largest, 3, self.spec.heads, self.spec.head_size)
        projected = torch.empty(shape if largest > CPU_TILE_PATCHES else 0, dtype=self.dtype)
        return [
            replace(
                self._layout([grid]),
                tile=CPU_TILE_PATCHES,
                projected=projected[: grid.patches] if grid.patches > CPU_TILE_PATCHES else None,
            )
            for grid in grids
        ]

    def _layout(self, grids: Sequence[Grid]) -> PackedBatch:
        """Return one layout for all images, packed together."""
        tables = [self._tables(grid).on_current_stream() for grid in grids]
        windows = None
        if self.spec.window:
            windows = Segments.of([length for table in tables for length in table.windows], self.device)
        return PackedBatch(
            rotations=_concatenated([table.rotations for table in tables]),
            position=_concatenated_or_none([table.position for table in tables]),
            segments=Segments.of([grid.patches for grid in grids], self.device),
            windows=windows,
            order=_concatenated_or_none(_offset([table.order for table in tables])),
            inverse=_concatenated_or_none(_offset([table.inverse for table in tables])),
            attend=self._attention,
            pointwise=self._pointwise,
        )

    def _make_tables(self, grid: Grid) -> GridTables:
        rotations = self._pointwise.rotations(grid, self.spec)
        return make_tables(grid, self.spec, self._module.positions, rotations, self.device)

    def _check(self, image: Tensor, grid: Grid) -> None:
        merge = self.spec.merge_size
        if grid.t != 1 or grid.h < merge or grid.w < merge or grid.h % merge or grid.w % merge:
            raise ValueError(f"{grid} is not the grid of one image in merged patches of {merge}×{merge}")
        expected = (grid.patches, self.spec.patch_values)
        pair = (grid.patches, self.spec.temporal_patch_size * self.spec.patch_values)
        if image.dtype is not torch.uint8 or image.shape not in (expected, pair):
            raise ValueError(
                f"patches of {grid} must be uint8 {expected}, or {pair} of two frames, got {image.dtype} "
                f"{tuple(image.shape)}"
            )


def _offset(orders: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add to the order of each packed image the number of rows before that image."""
    begin = 0
    offset: list[Tensor | None] = []
    for order in orders:
        offset.append(order if order is None or not begin else order + begin)
        begin += 0 if order is None else len(order)
    return offset


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _concatenated_or_none(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return _concatenated(present) if present else None
