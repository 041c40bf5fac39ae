"""FFmpeg's libraries, which OpenCV's wheel contains: where they are, and what decoding a video needs of them.

OpenCV itself is never loaded: it hides packets, times and errors, and fails to convert interlaced frames without saying
so (docs/decisions/video-decoder.md). The structures below are FFmpeg's public ones, whose fields stay where they are
within a major version of a library (`_MAJORS`). `load` refuses libraries of another one.
"""

import ctypes
from contextlib import suppress
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

# The packages that contain the libraries. The first one that is installed counts.
_PACKAGES = ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless")
# FFmpeg 8. In the order in which they are loaded.
_MAJORS = {"avutil": 60, "avcodec": 62, "avformat": 62, "swscale": 9}
_REMEDY = "pip install 'encoder-service[video]'"


class Libraries(NamedTuple):
    """The name and version of what decides pixels, and the paths of the libraries by `_MAJORS`."""

    name: str
    paths: dict[str, Path]


def installed() -> Libraries:
    """Return the libraries that decode videos, without loading them: only decoder processes do that.

    Raises `ValueError` if there are none that this module can use.
    """
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            return _libraries(name, Distribution.from_name(name))
    raise ValueError(f"OpenCV is not installed: {_REMEDY}")


def _libraries(name: str, package: Distribution) -> Libraries:
    paths = {}
    for library, major in _MAJORS.items():
        for file in package.files or ():
            if file.name.startswith(f"lib{library}-") and f".so.{major}." in file.name:
                paths[library] = Path(str(file.locate()))
    if len(paths) < len(_MAJORS):
        raise ValueError(f"{name} {package.version} does not contain FFmpeg 8: {_REMEDY}")
    return Libraries(f"FFmpeg of {name} {package.version}", paths)


class Rational(Structure):
    """A fraction."""

    num: int
    den: int
    _fields_ = (("num", c_int), ("den", c_int))

    def __float__(self) -> float:
        return self.num / self.den if self.den else 0.0


class Packet(Structure):
    """An encoded frame. Times are in units of its stream, `NO_TIME` if unknown. Its frame gets its `opaque`."""

    pts: int
    dts: int
    stream_index: int
    flags: int
    opaque: int | None
    _fields_ = (
        ("buf", c_void_p),
        ("pts", c_int64),
        ("dts", c_int64),
        ("data", c_void_p),
        ("size", c_int),
        ("stream_index", c_int),
        ("flags", c_int),
        ("side_data", c_void_p),
        ("side_data_elems", c_int),
        ("duration", c_int64),
        ("pos", c_int64),
        ("opaque", c_void_p),
    )


class _SideData(Structure):
    _fields_ = (("data", POINTER(c_int)), ("size", c_size_t), ("kind", c_int))


class _Parameters(Structure):
    _fields_ = (
        ("codec_type", c_int),
        ("codec_id", c_int),
        ("codec_tag", c_uint),
        ("extradata", c_void_p),
        ("extradata_size", c_int),
        ("coded_side_data", POINTER(_SideData)),
        ("nb_coded_side_data", c_int),
    )


class _Stream(Structure):
    _fields_ = (
        ("av_class", c_void_p),
        ("index", c_int),
        ("id", c_int),
        ("codecpar", POINTER(_Parameters)),
        ("priv_data", c_void_p),
        ("time_base", Rational),
        ("start_time", c_int64),
        ("duration", c_int64),
        ("nb_frames", c_int64),
        ("disposition", c_int),
        ("discard", c_int),
        ("sample_aspect_ratio", Rational),
        ("metadata", c_void_p),
        ("avg_frame_rate", Rational),
    )


class _IndexEntry(Structure):
    _fields_ = (("pos", c_int64), ("timestamp", c_int64), ("flags_and_size", c_uint))


class _Format(Structure):
    _fields_ = (
        ("av_class", c_void_p),
        ("iformat", c_void_p),
        ("oformat", c_void_p),
        ("priv_data", c_void_p),
        ("pb", c_void_p),
        ("ctx_flags", c_int),
        ("nb_streams", c_uint),
        ("streams", POINTER(POINTER(_Stream))),
        ("nb_stream_groups", c_uint),
        ("stream_groups", c_void_p),
        ("nb_chapters", c_uint),
        ("chapters", c_void_p),
        ("url", c_char_p),
        ("start_time", c_int64),
        ("duration", c_int64),
    )


class Frame(Structure):
    """A decoded frame."""

    width: int
    height: int
    format: int
    pts: int
    opaque: int | None
    flags: int
    data: Any
    linesize: Any
    _fields_ = (
        ("data", c_void_p * 8),
        ("linesize", c_int * 8),
        ("extended_data", c_void_p),
        ("width", c_int),
        ("height", c_int),
        ("nb_samples", c_int),
        ("format", c_int),
        ("pict_type", c_int),
        ("sample_aspect_ratio", Rational),
        ("pts", c_int64),
        ("pkt_dts", c_int64),
        ("time_base", Rational),
        ("quality", c_int),
        ("opaque", c_void_p),
        ("repeat_pict", c_int),
        ("sample_rate", c_int),
        ("buf", c_void_p * 8),
        ("extended_buf", c_void_p),
        ("nb_extended_buf", c_int),
        ("side_data", c_void_p),
        ("nb_side_data", c_int),
        ("flags", c_int),
    )


class _Io(Structure):
    _fields_ = (("av_class", c_void_p), ("buffer", c_void_p))


NO_TIME = -(1 << 63)
TIME_BASE = 1_000_000  # units of a file's duration in a second
VIDEO_STREAM = 0
DISCARD_ALL = 48
PACKET_KEY, PACKET_DISCARD = 1, 4
INDEX_DISCARD = 2
FRAME_INTERLACED = 8
RGB24, BGR24 = 2, 3
DISPLAY_MATRIX = 5
SEEK_SIZE = 0x10000
LOG_ERRORS = 16
NO_MEMORY, AGAIN = -12, -11
END = -int.from_bytes(b"EOF ", "little")

ReadFunction = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
SeekFunction = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64, c_int)

_P, _PP = c_void_p, POINTER(c_void_p)
# Library -> function -> type of its result, and types of its arguments.
_FUNCTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "avutil": {
        "av_log_set_level": (None, c_int),
        "av_malloc": (_P, c_size_t),
        "av_free": (None, _P),
        "av_dict_set": (c_int, _PP, c_char_p, c_char_p, c_int),
        "av_dict_free": (None, _PP),
        "av_opt_set": (c_int, _P, c_char_p, c_char_p, c_int),
        "av_display_rotation_get": (ctypes.c_double, POINTER(c_int)),
        "av_frame_alloc": (POINTER(Frame),),
        "av_frame_get_buffer": (c_int, POINTER(Frame), c_int),
        "av_frame_unref": (None, POINTER(Frame)),
        "av_frame_free": (None, POINTER(POINTER(Frame))),
    },
    "avcodec": {
        "avcodec_find_decoder": (_P, c_int),
        "avcodec_get_name": (c_char_p, c_int),
        "avcodec_alloc_context3": (_P, _P),
        "avcodec_parameters_to_context": (c_int, _P, POINTER(_Parameters)),
        "avcodec_open2": (c_int, _P, _P, _P),
        "avcodec_free_context": (None, _PP),
        "avcodec_send_packet": (c_int, _P, POINTER(Packet)),
        "avcodec_receive_frame": (c_int, _P, POINTER(Frame)),
        "av_packet_alloc": (POINTER(Packet),),
        "av_packet_unref": (None, POINTER(Packet)),
        "av_packet_free": (None, POINTER(POINTER(Packet))),
        "av_packet_side_data_get": (POINTER(_SideData), POINTER(_SideData), c_int, c_int),
    },
    "avformat": {
        "avio_alloc_context": (POINTER(_Io), _P, c_int, c_int, _P, ReadFunction, _P, SeekFunction),
        "avio_context_free": (None, POINTER(POINTER(_Io))),
        "avformat_alloc_context": (POINTER(_Format),),
        "avformat_open_input": (c_int, POINTER(POINTER(_Format)), c_char_p, _P, _PP),
        "avformat_find_stream_info": (c_int, POINTER(_Format), _P),
        "avformat_close_input": (None, POINTER(POINTER(_Format))),
        "avformat_index_get_entries_count": (c_int, POINTER(_Stream)),
        "avformat_index_get_entry": (POINTER(_IndexEntry), POINTER(_Stream), c_int),
        "av_guess_frame_rate": (Rational, POINTER(_Format), POINTER(_Stream), _P),
        "av_read_frame": (c_int, POINTER(_Format), POINTER(Packet)),
    },
    "swscale": {
        "sws_alloc_context": (_P,),
        "sws_free_context": (None, _PP),
        "sws_scale_frame": (c_int, _P, POINTER(Frame), POINTER(Frame)),
    },
}


def load() -> Any:
    """Load the libraries; return a namespace of the functions. Raises `ValueError` or `OSError` if that fails."""
    paths = installed().paths
    functions = SimpleNamespace()
    for library, declared in _FUNCTIONS.items():
        loaded = ctypes.CDLL(str(paths[library]))
        version = getattr(loaded, f"{library}_version")()
        if version >> 16 != _MAJORS[library]:
            raise ValueError(f"{paths[library].name} is version {version >> 16}, not {_MAJORS[library]}")
        for name, (result, *arguments) in declared.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(functions, name, function)
    return functions
