import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.models.flops import matmul_parameters, step_flops
from lightning_hetero.models.llama import HeteroLM, LMConfig
from lightning_hetero.models.packing import pack_samples

CONFIG = LMConfig(vocab_size=50, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)


def test_matmul_parameters_are_the_models_matrices_without_the_embedding():
    model = HeteroLM(CONFIG)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matmul_parameters(CONFIG) == matrices - model.embed_tokens.weight.numel()


def test_matrix_products_equal_what_torch_counts():
    model = HeteroLM(CONFIG)
    lengths = [20, 3, 11]
    batch = pack_samples([[1] * length for length in lengths])
    with FlopCounterMode(display=False) as counter:
        model(
            batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen
        ).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if op == torch.ops.aten.mm)
    assert products == 6 * matmul_parameters(CONFIG) * sum(lengths)


def test_attention_grows_with_the_sum_of_squares():
    base = 6 * matmul_parameters(CONFIG) * 100
    assert step_flops(CONFIG, [100]) - base == 6 * 3 * 64 * 100**2
    assert step_flops(CONFIG, [50, 50]) - base == 6 * 3 * 64 * 2 * 50**2
