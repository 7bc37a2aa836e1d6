"""The tiny model for training: Qwen3's network in plain PyTorch, and the Muon optimiser for its matrices."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 8,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), CONFIG["rms_norm_eps"]).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form; x [batch, heads, length, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: dict):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        hidden = config["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden]."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A norm and attention, then a norm and an MLP; both results are added to the residual stream."""

    def __init__(self, config: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config["hidden_size"]), RMSNorm(config["hidden_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyModel(nn.Module):
    """Qwen3. Its parameter names are those of the checkpoint without the prefix `model.`."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"])
        half = torch.arange(0, config["head_dim"], 2).float() / config["head_dim"]
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), config["rope_theta"] ** -half)
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((angles.sin(), angles.sin()), dim=-1), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set small random weights; projections that write to the residual stream start at zero."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" not in name:
                parameter.normal_(std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of ids [batch, length]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def weighted_loss(model: nn.Module, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean loss and the mean loss of the answers' tokens, for tokens and weights [rows, length + 1]."""
    logits = model(tokens[:, :-1]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    answers = (w >= 8).float()
    return torch.stack(((losses * w).sum() / w.sum(), (losses * answers).sum() / answers.sum().clamp(min=1)))


def orthogonalize(g: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrices of a stack [n, rows, cols] by Newton-Schulz iteration (Jordan et al., Muon, 2024)."""
    x = g.bfloat16()
    if tall := g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    """An optimiser for weight matrices: momentum with an orthogonalised update. Matrices of one shape are updated together."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float):
        self.weight_decay = weight_decay
        shapes = sorted({tuple(p.shape) for p in parameters})
        self.groups = [[p for p in parameters if tuple(p.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        cuda = parameters[0].device.type == "cuda"
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if cuda else orthogonalize

    @torch.no_grad()
    def step(self, lr: float, momentum: float) -> None:
        """One update of all matrices."""
        for group, buffer in zip(self.groups, self.momenta, strict=True):
            grad = torch.stack([p.grad for p in group])
            buffer.lerp_(grad, 1 - momentum)
            update = self.orthogonalize(grad.lerp(buffer, momentum)).float()
            update *= lr * max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_sub_(group, list(update.unbind()))


def load_model(model: TinyModel, folder: Path) -> None:
    """Reads the weights that `save_model` wrote."""
    from safetensors.torch import load_file

    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in load_file(folder / "model.safetensors").items()})


def save_model(model: TinyModel, folder: Path) -> None:
    """Writes the Hugging Face folder's weights (bfloat16) and configs."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chat_end, end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = {**model.config, "eos_token_id": chat_end, "pad_token_id": end, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [chat_end, end], "pad_token_id": end, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
