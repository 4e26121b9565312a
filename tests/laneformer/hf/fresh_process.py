"""Load an exported folder without our packages.

    python -I fresh_process.py HF_DIR QUESTIONS.pt ANSWERS.json [TRANSFORMERS_DIR]

`questions` holds inputs with the answers of the training model and SentencePiece; ANSWERS.json
gets the differences of Transformers' answers from them. TRANSFORMERS_DIR: a folder that holds
another version of Transformers.
"""

import json
import sys

if len(sys.argv) > 4:
    sys.path.insert(0, sys.argv[4])


class Blocker:
    """Refuses our packages even where an editable install would find them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in (
            "laneformer",
            "records",
            "tools",
            "train",
            "evals",
            "data_mixtures",
            "torchtitan",
        ):
            raise ImportError(f"{name} must not be needed")


sys.meta_path.insert(0, Blocker)

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

folder, questions_path, answers_path = sys.argv[1:4]
questions = torch.load(questions_path)
load = {"trust_remote_code": True, "dtype": torch.float32}
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, **load).eval()
ids, prompts = questions["ids"], questions["prompts"]


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max())


def new_tokens(rows: list[list[int]], **options: object) -> list[list[int]]:
    """Generate from prompts of several lengths in one left-padded batch; the new tokens of each,
    up to its `</s>`.
    """
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=questions["new_tokens"], **options)
    rows = [row[batch["input_ids"].shape[1] :].tolist() for row in out]
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def sample(**options: object) -> list[list[int]]:
    torch.manual_seed(7)
    return new_tokens(prompts, do_sample=True, temperature=0.8, top_k=50, top_p=0.9, **options)


def check_models() -> dict:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    base = AutoModel.from_pretrained(folder, **load).eval()
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    return {
        "logits_off": off(model(ids).logits, questions["logits"]),
        "hidden_off": off(base(ids).last_hidden_state, questions["hidden"]),
        "padded_logits_off": off(model(padded, attention_mask=mask).logits[:, 5:], questions["logits"]),
        "config": {name: getattr(config, name) for name in questions["config"]},
        "class": type(model).__name__,
        "stored_dtype": str(AutoModel.from_pretrained(folder, trust_remote_code=True, dtype="auto").dtype),
    }


def check_generation() -> dict:
    first = sample()
    return {
        "greedy": [new_tokens([prompt], do_sample=False)[0] for prompt in prompts],
        "greedy_padded_batch": new_tokens(prompts, do_sample=False),
        "greedy_without_cache": new_tokens(prompts, do_sample=False, use_cache=False),
        "greedy_static_cache": new_tokens(prompts, do_sample=False, cache_implementation="static"),
        "sampling_repeats": sample() == first,
        "sampling_without_cache": sample(use_cache=False) == first,
        "sampling_differs_from_greedy": first != new_tokens(prompts, do_sample=False),
    }


def chat_ids(messages: list[dict]) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and 1 for each that is trained."""
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return made["input_ids"], made["assistant_masks"]


def check_tokenizer() -> dict:
    text = tokenizer.apply_chat_template(questions["chat"], tokenize=False, add_generation_prompt=True)
    return {
        "texts_off": [
            text for text, expected in questions["texts"] if tokenizer(text)["input_ids"] != expected
        ],
        "decoded_off": [t for t, expected in questions["texts"] if tokenizer.decode(expected[1:]) != t],
        "chat": text,
        "conversations_off": [
            asked for asked in questions["conversations"] if chat_ids(asked[0]) != asked[1:]
        ],
        "chat_without_prompt": tokenizer.apply_chat_template(questions["chat"], tokenize=False),
        "special_ids": [
            tokenizer.unk_token_id,
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        ],
    }


def check_saving() -> dict:
    """What a user's own save_pretrained writes is again a folder that loads, code included."""
    copy = answers_path + ".copy"
    model.save_pretrained(copy)
    loaded = AutoModelForCausalLM.from_pretrained(copy, **load).eval()
    return {"saved_logits_off": off(loaded(ids).logits, questions["logits"])}


with torch.no_grad():
    answers = {**check_models(), **check_generation(), **check_tokenizer(), **check_saving()}
answers["transformers"] = transformers.__version__
answers["ours"] = [name for name in sys.modules if name.split(".")[0] == "laneformer"]
with open(answers_path, "w") as file:
    json.dump(answers, file)
