"""One table: recipes that a training refuses before its first step, each by a dry run, with the text of the error."""

import pytest

import models  # noqa: F401 (registers the families)
from titan_muon.trainer.commands import train
from titan_muon.trainer.recipe import RecipeError, degrees
from titan_muon.trainer.recipe.command_line import parse

EP, TP = "--parallelism.expert_parallel_degree", "--parallelism.tensor_parallel_degree"
PLACE, RULE = "--placement.rule", "--optimizer.rule"
BETAS = "options={betas=[0.9,2.0]}"
ALONE = "--training.global_batch_size -1 --training.local_batch_size 1 --world-size"
STAGES = f"--parallelism.pipeline_parallel_degree 2 {ALONE} 2 --parallelism.pipeline_parallel_schedule"
PARTS = "--parallelism.module_fqns_per_model_part"
FIRST, SECOND = '["tok_embeddings","layers.0"]', '["layers.1","layers.2"]'
THIRD, LAST = '["layers.3"]', '["norm","lm_head"]'
OWNED = "placement='owned'"
REFUSED = [
    # By Muon.
    ("--muon.algorithm muonh", r"muon\.weight_decay = 0\.1: algorithm = 'muonh' keeps the norm"),
    ("--muon.algorithm normoun", r"muon\.algorithm = 'normoun' is unknown; did you mean 'normuon'\?"),
    ("--muon.expert.orthogonalize gram --muon.expert.ns_dtype bfloat16", r"ns_dtype = 'bfloat16'.* diverges"),
    ("--muon.expert.ns_kernel triton", r"muon\.expert\.ns_kernel = 'triton' needs CUDA and the package triton"),
    ("--muon.expert.buffer_gib 1e-6 --world-size 2", r"muon\.expert\.buffer_gib = .* is too small"),
    ("--muon.split {match='*.wq.weight',dims='(hf)d->h|fd',lengths={f=7}}", r"muon\.split: dims = "),
    # By rules, placements and models.
    ("--placement.muon own", r"placement\.muon = 'own' is unknown; did you mean 'owned'\?"),
    ("--model.flavor moe_tinny", r"^command line: model\.flavor = 'moe_tinny' is unknown; .* 'moe_tiny'"),
    (f"{RULE} {{match='*norm*',optimizer='muon'}}", r"optimizer\.rule\[0\] .* gives Muon \S+norm.weight of"),
    (f"{RULE} {{match='*norm*',optimizer='adamw',{BETAS}}}", "betas"),
    (f"{RULE} {{match='layer.0.*',optimizer='adamw'}}", r"^command line: optimizer\.rule\[0\]: 'layer\.0\.\*' take"),
    (f"{RULE} {{match='layers.*',optimizer='adamw'}} --placement.muon owned", "Muon takes no"),
    (f"{RULE} {{match='*wq*',optimizer='muon'}} --optimizer.defaults false", "no rule matches"),
    # By data, batch and machine.
    ("--model.vocab_size 10", r"data\.tokenizer has 258 tokens and the model embeds 10"),
    ("--data.tokenizer hf --data.tokenizer_path absent --model.vocab_size 9", r"data\.tokenizer_path = 'absent' has"),
    (f"--training.disable_cuda_graphs false {EP} 2", "disable_cuda_graphs"),
    ("--training.global_batch_size 7 --world-size 2", r"training\.global_batch_size = 7 is not accepted on 2"),
    (f"{TP} 3 --world-size 2", "takes a multiple of 3 processes, and this is 2"),
    ("--checkpoint.async_mode async_with_pinned_mem", r"checkpoint\.async_mode .* not accepted on the CPU"),
    # By the model.
    ("--model.name qwen", r"^command line: model\.name = 'qwen' is unknown; did you mean 'qwen3'\?.*llama3"),
    (f"{TP} 8 {ALONE} 8", "= 8 must divide the model's 8 query heads and 4 key-value"),
    (f"{EP} 3 {ALONE} 3", "= 3 must divide the model's 16 experts"),
    (f"--model.name llama3 --model.flavor tiny {EP} 2 {ALONE} 2", "but the model has no experts"),
    (f"--training.seq_len 384 --parallelism.context_parallel_degree 2 {ALONE} 2", "= 384 is not a multiple of 256"),
    ("--training.seq_len 60000", r"training\.seq_len = 60000 exceeds the 40960 positions .* set it to 40960"),
    ("--model.attention flex", r"model\.attention = 'flex' has no backward on the CPU"),
    ("--model.attention varlen", r"model\.attention = 'varlen' has no backward on the CPU"),
    ("--model.name gpt_oss --model.flavor debugmodel", r"model\.attention = 'dense'.* no linear attention, .*'flex'"),
    ("--qk_clip.mode clip", r'qk_clip\.mode = "clip" is not possible: layers\.0 normalizes .* "log" or "off"'),
    # By the schedule and the cut of a pipeline. TorchTitan would drop unlisted modules, and run stages as listed.
    (f"{STAGES} 1F1C", r"schedule = '1F1C'.*valid options"),
    (f"{STAGES} PipelineScheduleMulti", "has no order of its own"),
    (f"{STAGES} zbvzerobubble", "write it 'ZBVZeroBubble'"),
    (f"{STAGES} DualPipeV", "'DualPipeV'.*use 'ZBVZeroBubble'"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{SECOND}]", "it names 4 modules"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{THIRD},{SECOND},{LAST}]", r"it has 'layers\.3' in the place of 'layers\.1'"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{SECOND},{THIRD},{LAST}]", r"has 4 parts; 1F1B on .*degree = 2 takes 2 parts"),
    (f'{STAGES} Interleaved1F1B {PARTS} [{FIRST},{SECOND},["layers.3","norm","lm_head"]]', "a multiple of 2 parts"),
    # By the owners.
    (f"{PLACE} {{match='*embed*',{OWNED}}} --world-size 2", r"tok_embeddings\.weight cannot be owned: .*in no layer"),
    (f"{PLACE} {{match='*.wo.weight',{OWNED},owner=2}} --world-size 2", r"layers\.0\..*wo\.weight cannot have owner"),
    (f"{PLACE} {{match='*experts*',{OWNED},owner=1}} {EP} 2 --world-size 2", r"experts\..* cannot have owner = 1; 0"),
    (
        f"{PLACE} {{match='*experts*',{OWNED}}} --world-size 2 --checkpoint.last_save_in_hf "
        "--checkpoint.last_save_model_only",
        r'placement\.rule: .*experts.* cannot be owned with checkpoint\.last_save_in_hf; set placement = "shard0"',
    ),
    # By files and packages.
    ("--model.hf_assets_path /no/where", r"model\.hf_assets_path = '/no/where': no such folder"),
    ("--checkpoint.initial_load_path /", r"checkpoint\.initial_load_path = '/' has no \.metadata"),
    ("--compile.enable --compile.backend foo", r"compile\.backend = 'foo': torch\.compile has no such"),
]


@pytest.mark.parametrize(("words", "problem"), REFUSED)
def test_a_recipe_is_refused_before_training(words: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A dry run only cuts the model, which torch could do before TorchTitan could train the parts.
    others = tuple(need for need in degrees.TORCH_NEEDS if need.key != "parallelism.pipeline_parallel_degree")
    monkeypatch.setattr(degrees, "TORCH_NEEDS", others)
    with pytest.raises(RecipeError, match=problem):
        train.train(parse(["--config", "configs/qwen_moe_muon.toml", "--dry-run", *words.split()]))
