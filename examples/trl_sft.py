"""Supervised fine-tuning with TRL: one process, DDP, or FSDP2 by the configuration of `accelerate launch`.

accelerate launch --config_file examples/fsdp2.json -m examples.trl_sft
"""

from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from examples.tiny_llama import Tokens, model, tokenizer
from titan_muon import head_splits, trainer_optimizer


def train(folder: str, steps: int = 8, resume: bool = False) -> PreTrainedModel:
    options = {"max_steps": steps, "save_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = SFTConfig(output_dir=folder, learning_rate=2e-3, weight_decay=0.1, bf16=False, **options)
    llama = model()
    optimizer = trainer_optimizer(llama, arguments, muon={"split": head_splits(llama)})
    data = Dataset.from_list([{"input_ids": sample["input_ids"].tolist()} for sample in Tokens()])
    trainer = SFTTrainer(
        llama, arguments, train_dataset=data, processing_class=tokenizer(), optimizer_cls_and_kwargs=optimizer
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


if __name__ == "__main__":
    train("runs/trl")
