"""The settings for vLLM: what an L4, a T4, something small and a CPU get."""

from dataclasses import replace

import pytest

from models.vllm_settings import GIB, Device, ModelShape, VllmSettings, choose

TURBO = ModelShape(1280, 32, 4, 5120, 5120, 51866, 128)
LARGE = replace(TURBO, decoder_layers=32)
BASE = ModelShape(512, 6, 6, 2048, 2048, 51865, 80)
L4 = Device("cuda", "L4", int(22.5 * GIB), (8, 9))
T4 = Device("cuda", "T4", int(14.6 * GIB), (7, 5))
CPU = Device("cpu", "CPU", 22 * GIB, cpus=2)


def engine(device: Device, shape: ModelShape = TURBO) -> dict[str, object]:
    return dict(choose(device, shape).engine)


@pytest.mark.parametrize(("shape", "millions"), [(BASE, 74), (LARGE, 1550), (TURBO, 809)])
def test_the_size_of_a_model_is_what_its_authors_say(shape: ModelShape, millions: int) -> None:
    assert shape.parameters / 1e6 == pytest.approx(millions, rel=0.03)


def test_an_l4_gets_bfloat16_and_an_fp8_cache() -> None:
    assert engine(L4)["dtype"] == "bfloat16"
    assert engine(L4)["kv_cache_dtype"] == "fp8"
    assert engine(replace(L4, capability=(8, 0)))["kv_cache_dtype"] == "auto"


def test_a_t4_gets_float16_and_no_fp8_cache() -> None:
    assert engine(T4)["dtype"] == "float16"
    assert engine(T4)["kv_cache_dtype"] == "auto"


def test_another_platform_gets_what_needs_no_cuda() -> None:
    other = engine(Device("rocm", "MI300X", 192 * GIB))
    assert (other["dtype"], other["kv_cache_dtype"]) == ("bfloat16", "auto")


def test_a_cpu_runs_eagerly_in_float32() -> None:
    settings = choose(CPU, BASE)
    assert settings.engine["dtype"] == "float32"
    assert settings.engine["enforce_eager"] is True
    assert settings.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert not settings.compile_encoder


@pytest.mark.parametrize("shape", [BASE, TURBO, LARGE])
@pytest.mark.parametrize("gib", [8, 14.6, 22.5, 80])
def test_what_is_asked_of_the_memory_holds_all_sequences(shape: ModelShape, gib: float) -> None:
    device = replace(L4, memory_bytes=int(gib * GIB))
    settings = choose(device, shape)
    share = settings.engine["gpu_memory_utilization"]
    needed = 2 * shape.parameters + settings.sequences * shape.cache_bytes(1)
    assert needed / device.memory_bytes < share <= 0.92
    assert 1 <= settings.sequences <= 64


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 4\.\d GiB, tiny GPU has 4\.0"):
        choose(Device("cuda", "tiny GPU", 4 * GIB, (8, 9)), LARGE)
    with pytest.raises(ValueError, match="there are 4"):
        choose(replace(CPU, memory_bytes=4 * GIB), LARGE)


@pytest.mark.parametrize("device", [L4, T4, CPU])
def test_lengths_are_warmed_up_to_the_whole_window(device: Device) -> None:
    settings: VllmSettings = choose(device, BASE)
    assert settings.warm_positions[-1] == 1500
    assert all(length % settings.position_step == 0 for length in settings.warm_positions)
    if settings.compile_encoder:  # every length that can come
        assert settings.warm_positions == tuple(range(settings.position_step, 1501, settings.position_step))


def test_a_config_that_is_not_whispers_is_refused() -> None:
    with pytest.raises(ValueError, match="llama"):
        ModelShape.read({"model_type": "llama"})
    with pytest.raises(ValueError, match="d_model"):
        ModelShape.read({"model_type": "whisper"})
