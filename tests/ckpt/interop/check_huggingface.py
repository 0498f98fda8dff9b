"""Lets `transformers` load a checkpoint and compares its logits with given ones.

    python check_huggingface.py DIR REFERENCE.npz [DIR REFERENCE.npz ...]

Exit status 0 if every tensor is found and used, and the logits are equal to 1e-5 of the largest
one, in fp32. With `mtp_logits` in the file, multi-token prediction is loaded and compared as well.
Needs torch, transformers and safetensors.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_layers import MtpModel

TOLERANCE = 1e-5


@torch.no_grad()
def problems_of(folder: Path, reference: Path) -> list[str]:
    with np.load(reference) as found:
        expected = dict(found)
    tokens = torch.tensor(expected["tokens"]).long()
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    ahead = tuple(f"model.layers.{model.config.num_hidden_layers + k}." for k in range(8))
    unexpected = [name for name in loading["unexpected_keys"] if not name.startswith(ahead)]
    problems = [f"{name} is missing" for name in loading["missing_keys"]]
    problems += [f"{name} is unknown" for name in unexpected]
    problems += [f"{name} has another shape" for name in loading["mismatched_keys"]]
    outputs = {"logits": model(tokens).logits}
    if "mtp_logits" in expected:
        outputs["mtp_logits"] = ahead_logits(model, tokens)
    for name, output in outputs.items():
        largest = np.abs(expected[name]).max()
        difference = np.abs(output.numpy() - expected[name]).max() / largest
        print(f"{folder}: {name} differ by {difference:.2g} of {largest:.3g}")
        if not difference <= TOLERANCE:
            problems.append(f"{name} differ by more than {TOLERANCE}")
    return [f"{folder}: {problem}" for problem in problems]


def ahead_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """What the first layer for multi-token prediction says of the token after the next."""
    # transformers finds these layers by a pattern that has the number of DeepSeek-V3's.
    layer = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}.*"]
    ahead = MtpModel.from_pretrained(model).eval()
    hidden = model.model(tokens).last_hidden_state[:, :-1]
    positions = torch.arange(hidden.shape[1])[None]
    hidden = ahead.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
    return model.lm_head(hidden)


if __name__ == "__main__":
    paths = list(map(Path, sys.argv[1:]))
    found = [
        line for pair in zip(paths[::2], paths[1::2], strict=True) for line in problems_of(*pair)
    ]
    sys.exit("\n".join(found) or None)
