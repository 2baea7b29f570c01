"""Lightning: one process, DDP, or FSDP2 by ModelParallelStrategy, with automatic optimization.

python -m examples.lightning_module
"""

from pathlib import Path

import lightning
from torch import Tensor
from torch.utils.data import DataLoader

from examples.tiny_llama import Tokens, model
from titan_muon import Hybrid


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.llama = model()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.llama(**batch).loss

    def configure_optimizers(self) -> Hybrid:
        return Hybrid(self, lr=2e-3)


def train(folder: str, steps: int = 8, resume: bool = False, **options: object) -> Llama:
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    # Epochs of four steps: Lightning resumes at the start of an epoch.
    options = {"limit_train_batches": 4, "gradient_clip_val": 1.0, **options}
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", logger=False, callbacks=[checkpoint], **options)
    llama = Llama()
    trainer.fit(
        llama,
        DataLoader(Tokens(), batch_size=2),
        ckpt_path=str(next(Path(folder).glob("*step=4.ckpt"))) if resume else None,
    )
    return llama


if __name__ == "__main__":
    train("runs/lightning")
