"""Lightning: one process, DDP by `strategy="ddp"`, or FSDP2 by ModelParallelStrategy, with automatic optimization.

python -m examples.lightning_module
"""

from pathlib import Path

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.llama = model()

    def configure_model(self) -> None:
        # Only ModelParallelStrategy makes a mesh.
        if self.device_mesh is not None:
            for part in (*self.llama.model.layers, self.llama):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.llama(**batch).loss

    def configure_optimizers(self) -> Hybrid:
        return Hybrid(self, lr=2e-3)


def train(folder: str, steps: int = 8, resume: bool = False, fsdp: bool = False, **options: object) -> Llama:
    # Epochs of four steps: Lightning resumes at the start of an epoch.
    options |= {"max_steps": steps, "limit_train_batches": 4, "gradient_clip_val": 1.0, "accelerator": "cpu"}
    if fsdp:
        options["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    llama, loader = Llama(), DataLoader(Tokens(), batch_size=2)
    saved = str(next(Path(folder).glob("*step=4.ckpt"))) if resume else None
    lightning.Trainer(logger=False, callbacks=[checkpoint], **options).fit(llama, loader, ckpt_path=saved)
    return llama


if __name__ == "__main__":
    train("runs/lightning")
