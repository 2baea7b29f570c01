"""Reinforcement learning on FSDP2: the optimizer's states are on the host while the policy generates.

torchrun --nproc_per_node=2 -m examples.rl_loop

The policy learns to repeat the token of its prompt. Advantages are relative to the answers of the same prompt, as in
GRPO (arXiv:2402.03300). A real loop would give the weights to an inference engine instead of calling the policy, and
that engine would use the memory that `offload` frees.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Categorical

from titan_muon import Hybrid, clip_grad_norm_

TOKENS, WIDTH, LENGTH, PROMPTS, ANSWERS = 16, 32, 4, 8, 8


class Policy(nn.Module):
    """Logits of the next token, from the prompt and the last token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, prompts: Tensor, last: Tensor) -> Tensor:
        """prompts, last: tokens of equal shape; logits have another dim, of TOKENS."""
        both = torch.cat([self.embedding(prompts), self.embedding(last)], dim=-1)
        return self.head(self.layers(both))


@torch.no_grad()
def generate(policy: nn.Module, prompts: Tensor) -> Tensor:
    """Sampled answers (n, LENGTH) to prompts (n,)."""
    tokens = [prompts]
    for _ in range(LENGTH):
        tokens.append(Categorical(logits=policy(prompts, tokens[-1])).sample())
    return torch.stack(tokens[1:], dim=1)


def loss(policy: nn.Module, prompts: Tensor, answers: Tensor, advantages: Tensor) -> Tensor:
    """Mean of -advantage * log probability over the tokens of all answers."""
    last = torch.cat([prompts[:, None], answers[:, :-1]], dim=1)
    log_probabilities = Categorical(logits=policy(prompts[:, None].expand_as(last), last)).log_prob(answers)
    return -(advantages[:, None] * log_probabilities).mean()


def train(
    iterations: int = 40, updates: int = 2, offload: bool = True, coefficients: str = "keller_jordan"
) -> tuple[nn.Module, list[float]]:
    """The policy after training, and this rank's mean reward by iteration, from 0 to 1."""
    policy = Policy()
    if dist.is_initialized():
        fully_shard(policy)
    # For a policy without pretraining. docs/finetuning.md has rates for pretrained ones.
    optimizer = Hybrid(policy, lr=3e-2, weight_decay=0.0, muon={"ns_coefficients": coefficients})
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    rewards = []
    for _ in range(iterations):
        if offload:
            optimizer.offload()
        prompts = torch.randint(TOKENS, (PROMPTS,)).repeat_interleave(ANSWERS)
        answers = generate(policy, prompts)
        reward = (answers == prompts[:, None]).float().mean(dim=1)
        rewards.append(reward.mean().item())
        groups = reward.view(PROMPTS, ANSWERS)
        spread = groups.std(dim=1, keepdim=True) + 1e-6
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()
        if offload:
            optimizer.reload()
        # Two updates with the same answers. Rewards of other policies would need PPO's ratio and its clip.
        for half in torch.randperm(len(prompts)).chunk(updates):
            loss(policy, prompts[half], answers[half], advantages[half]).backward()
            clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return policy, rewards


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _, rewards = train()
    if dist.get_rank() == 0:
        print("mean reward by iteration:", " ".join(f"{reward:.2f}" for reward in rewards))
    dist.destroy_process_group()
