"""Load exported folders without our packages.

    python -I fresh_process.py TRANSFORMERS_DIR QUESTIONS.pt ANSWERS.pt HF_DIR ...

ANSWERS.pt gets Transformers' answers for each folder to the same questions (test_export.py).
TRANSFORMERS_DIR holds another version of Transformers, or nothing.
"""

import sys

OURS = ("laneformer", "records", "tools", "train", "evals", "data_mixtures", "torchtitan")


class Blocker:
    """Block imports of our packages, even from an editable install."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in OURS:
            raise ImportError(f"{name} must not be needed")


_, transformers_folder, questions_path, answers_path, *folders = sys.argv
if transformers_folder:
    sys.path.insert(0, transformers_folder)
sys.meta_path.insert(0, Blocker)

import torch  # noqa: E402
import transformers  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

LOAD = {"trust_remote_code": True, "dtype": torch.float32}
questions = torch.load(questions_path)


def ask_model(path: str) -> dict:
    ids = questions["ids"]
    model = AutoModelForCausalLM.from_pretrained(path, **LOAD).eval()
    base = AutoModel.from_pretrained(path, **LOAD).eval()
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    model.save_pretrained(copy := f"{answers_path}.{path.replace('/', '-')}")
    # a user's own folder, code included
    saved = AutoModelForCausalLM.from_pretrained(copy, **LOAD).eval()
    padded = model(pad(ids, (5, 0)), attention_mask=pad(torch.ones_like(ids), (5, 0)))
    return {
        "logits": model(ids).logits,
        "hidden": base(ids).last_hidden_state,
        "padded_logits": padded.logits[:, 5:],
        "saved_logits": saved(ids).logits,
        "config": {name: getattr(config, name) for name in questions["config"]},
        "dtype": AutoModel.from_pretrained(path, trust_remote_code=True, dtype="auto").dtype,
        **generate(path, model),
    }


def generate(path: str, model: torch.nn.Module) -> dict:
    """Return greedy tokens up to `</s>` for several prompts, alone and in one left-padded batch."""
    tokenizer, prompts = AutoTokenizer.from_pretrained(path), questions["prompts"]

    def greedy(rows, **options):
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        out = model.generate(
            **batch, max_new_tokens=questions["new_tokens"], do_sample=False, **options
        )
        rows = [row[batch["input_ids"].shape[1] :].tolist() for row in out]
        return [row[: row.index(2) + 1] if 2 in row else row for row in rows]

    return {
        "greedy": [greedy([prompt])[0] for prompt in prompts],
        "greedy_padded_batch": greedy(prompts),
        "greedy_without_cache": greedy(prompts, use_cache=False),
        "greedy_static_cache": greedy(prompts, cache_implementation="static"),
    }


def ask_tokenizer(path: str) -> dict:
    """Return the tokenizer's special ids, texts' ids and decoding, and conversations' ids and trained masks."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in questions["texts"]]
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    chats = [tokenizer.apply_chat_template(messages, **options) for messages in questions["chats"]]
    names = ("unk_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "ids": ids,
        "decoded": [tokenizer.decode(row[1:]) for row in ids],
        "special_ids": [getattr(tokenizer, name) for name in names],
        "chats": [(chat["input_ids"], chat["assistant_masks"]) for chat in chats],
    }


with torch.no_grad():
    answers = {path: {**ask_model(path), **ask_tokenizer(path)} for path in folders}
for answer in answers.values():
    answer["transformers"] = transformers.__version__
    answer["ours"] = [name for name in sys.modules if name.split(".")[0] == "laneformer"]
torch.save(answers, answers_path)
