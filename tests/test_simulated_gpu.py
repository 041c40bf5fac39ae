"""The simulated GPU finds each kind of mistake, and nothing in correct code."""

import threading

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the extra dev brings it")

from encoder_contract.registration import CudaRegistration
from tests.simulated_gpu import simulated_gpu
from tests.waiting import PATIENCE_S

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu():
    with simulated_gpu() as gpu, torch.inference_mode():
        yield gpu


def kinds(gpu):
    """Return the kinds of what was found."""
    return {finding.partition(":")[0] for finding in gpu.findings}


def on(stream, size=4):
    """Return a tensor that a stream has made."""
    with torch.cuda.stream(stream):
        return torch.ones(size, device=GPU)


def test_a_stream_that_waits_for_an_event_races_with_nobody(gpu):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    values, made = on(one), torch.cuda.Event()
    made.record(one)
    other.wait_event(made)
    with torch.cuda.stream(other):
        doubled = values * 2
        values.record_stream(other)
        assert doubled.is_cuda
        assert doubled.cpu().tolist() == [2.0] * 4
    del values
    assert not gpu.findings


def test_a_stream_that_reads_or_overwrites_what_another_one_uses_is_found(gpu):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    values = on(one)
    with torch.cuda.stream(other):
        _ = values * 2
    assert [finding.partition(" on ")[0] for finding in gpu.findings] == ["race: mul"]
    assert "tests/test_simulated_gpu.py" in next(iter(gpu.findings))
    gpu.findings.clear()
    other.synchronize()
    with torch.cuda.stream(one):
        values.add_(1)
    assert not gpu.findings, "this thread has waited for the other stream"
    with torch.cuda.stream(other):
        values.zero_()
    assert kinds(gpu) == {"race"}


def test_memory_freed_while_another_stream_uses_it_is_found(gpu):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    values = on(one)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        kept = values.sum()
    del values
    assert kinds(gpu) == {"freed"}
    with torch.cuda.stream(other):
        assert kept.item() == 4.0


def test_a_tensor_of_another_device_is_found(gpu):
    values = torch.ones(4, device=GPU)
    values.add_(torch.ones(4))
    assert kinds(gpu) == {"devices"}
    gpu.findings.clear()
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        values.add_(1)
    assert "devices" in kinds(gpu)


def test_a_thread_that_must_not_wait_is_found_if_it_does(gpu):
    found = []

    def work():
        values = torch.ones(4, device=GPU)
        found.append(kinds(gpu))
        values.sum().item()
        found.append(kinds(gpu))

    for name in ("copy-out", "vit"):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    assert found == [set(), set(), set(), {"waits"}]


def test_a_copy_from_memory_that_is_not_pinned_waits(gpu):
    gpu.never_waits.add(threading.current_thread().name)
    torch.ones(4).pin_memory().to(GPU, non_blocking=True)
    assert not gpu.findings
    torch.ones(4).to(GPU, non_blocking=True)
    assert kinds(gpu) == {"waits"}


def test_host_memory_that_is_read_before_its_copy_is_complete_is_found(gpu):
    copied = torch.ones(4, device=GPU).to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert copied.tolist() == [1.0] * 4
    assert not gpu.findings
    torch.ones(4, device=GPU).to("cpu", non_blocking=True).tolist()
    assert kinds(gpu) == {"early"}


def test_host_memory_that_is_overwritten_before_its_copy_is_complete_is_found(gpu):
    pinned = torch.ones(4).pin_memory()
    pinned.to(GPU, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned.copy_(torch.zeros(4))
    assert not gpu.findings
    pinned.to(GPU, non_blocking=True)
    pinned.copy_(torch.ones(4))
    assert kinds(gpu) == {"early"}


def test_a_graph_whose_input_is_freed_is_found(gpu):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    values = torch.ones(4, device=GPU)
    with torch.cuda.graph(graph, stream=stream):
        doubled = values * 2
        del doubled  # in the memory of the graph
    with torch.cuda.stream(stream):
        graph.replay()
        assert not gpu.findings
        del values
        graph.replay()
    assert kinds(gpu) == {"freed"}


def test_a_copy_to_the_host_that_is_reported_before_it_is_complete_is_found(gpu):
    copied = torch.empty(4)
    copied.copy_(torch.ones(4, device=GPU), non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu.reported_by_host("a report")
    assert not gpu.findings, "another stream copies"
    gpu.reported_by_host("a report")
    assert kinds(gpu) == {"early"}


def test_a_copy_over_two_registered_pieces_is_found(gpu):
    host = torch.empty(8, dtype=torch.uint8)
    rows = torch.ones(8, dtype=torch.uint8, device=GPU)
    gpu.register(host.data_ptr(), 4)
    host[:4].copy_(rows[:4], non_blocking=True)
    host[4:].copy_(rows[4:], non_blocking=True)
    assert not gpu.findings
    host.copy_(rows, non_blocking=True)
    gpu.register(host.data_ptr() + 4, 4)
    host.copy_(rows, non_blocking=True)
    assert kinds(gpu) == {"registered"}
    assert sum(gpu.findings.values()) == 2, "partly registered, and in two pieces"


def test_a_replay_computes_again_over_the_same_memory(gpu):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    values, factor = torch.ones(4, device=GPU), 2
    with torch.cuda.graph(graph, stream=stream):
        doubled = values * factor
    with torch.cuda.stream(stream):
        values.fill_(3)
        graph.replay()
        assert doubled.cpu().tolist() == [6.0] * 4
    assert not gpu.findings


def test_a_host_value_inside_a_graph_stays_that_of_the_capture(gpu):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    values, count = torch.ones(4, device=GPU), torch.tensor(2)
    with torch.cuda.graph(graph, stream=stream):
        taken = values[: int(count)].sum()
    count.fill_(4)
    with torch.cuda.stream(stream):
        graph.replay()
        assert taken.item() == 2.0


@pytest.mark.parametrize(
    "illegal",
    [lambda x: x.sum().item(), lambda x: x + torch.ones(4).to(GPU), lambda _: torch.cuda.synchronize()],
    ids=["reads a value", "copies from the host", "waits"],
)
def test_an_illegal_call_in_a_capture_is_found_and_raises(gpu, illegal):
    values = torch.ones(4, device=GPU)
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
    ):
        illegal(values)
    assert kinds(gpu) == {"capture"}


def test_leaving_a_stream_of_another_device_than_the_current_one_is_found(gpu):
    """Leaving it makes the thread's current device current again, which creates a context there."""
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        pass
    assert kinds(gpu) == {"context"}
    gpu.findings.clear()
    torch.cuda.mem_get_info("cuda:1")
    assert kinds(gpu) == {"context"}
    gpu.findings.clear()
    torch.cuda.set_device("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda.mem_get_info("cuda:1")
    assert not gpu.findings


def test_torch_is_as_before_afterwards():
    def parts():
        return torch.cuda.Stream, torch.Tensor.tolist, threading.Thread.start, torch.cuda.is_available()

    before = parts()
    with simulated_gpu():
        assert torch.cuda.is_available()
        assert torch.ones(1, device="cuda").is_cuda
    assert before == parts()
    assert not torch.ones(1).is_cuda


def test_a_registration_that_begins_late_is_of_its_own_simulation():
    late = threading.Event()

    def register(memory: torch.Tensor) -> bool:
        assert late.wait(PATIENCE_S)
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)
        return True

    with simulated_gpu() as gpu:
        CudaRegistration(torch.empty(64, dtype=torch.uint8), register)
        threading.Timer(0.2, late.set).start()
    assert len(gpu.registered) == 1
