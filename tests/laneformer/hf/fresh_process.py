"""Load exported folders without our packages.

    python -I fresh_process.py TRANSFORMERS_DIR ANSWERS.json HF_DIR QUESTIONS.pt ...

The questions of a folder hold inputs with the answers of the training model and SentencePiece; ANSWERS.json gets, for
each folder, the differences of Transformers' answers from them. TRANSFORMERS_DIR holds another version of Transformers,
or nothing.
"""

import json
import sys

OURS = ("laneformer", "records", "tools", "train", "evals", "data_mixtures", "torchtitan")


class Blocker:
    """Refuses our packages even where an editable install would find them."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in OURS:
            raise ImportError(f"{name} must not be needed")


if sys.argv[1]:
    sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Blocker)

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

LOAD = {"trust_remote_code": True, "dtype": torch.float32}


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max())


class Folder:
    """A folder's model and tokenizer, and what they are asked."""

    def __init__(self, path: str, questions: str):
        self.path, self.questions = path, torch.load(questions)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, **LOAD).eval()

    def answers(self, copy: str) -> dict:
        return {
            **self.check_model(),
            **self.check_generation(),
            **self.check_tokenizer(),
            "saved_logits_off": self.check_saving(copy),
        }

    def check_model(self) -> dict:
        ids, expected = self.questions["ids"], self.questions["logits"]
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=True)
        base = AutoModel.from_pretrained(self.path, **LOAD).eval()
        padded = torch.nn.functional.pad(ids, (5, 0))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
        stored = AutoModel.from_pretrained(self.path, trust_remote_code=True, dtype="auto")
        return {
            "logits_off": off(self.model(ids).logits, expected),
            "hidden_off": off(base(ids).last_hidden_state, self.questions["hidden"]),
            "padded_logits_off": off(self.model(padded, attention_mask=mask).logits[:, 5:], expected),
            "config": {name: getattr(config, name) for name in self.questions["config"]},
            "class": type(self.model).__name__,
            "stored_dtype": str(stored.dtype),
        }

    def new_tokens(self, rows: list[list[int]], **options: object) -> list[list[int]]:
        """Of prompts of several lengths in one left-padded batch; of each, up to its `</s>`."""
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        out = self.model.generate(**batch, max_new_tokens=self.questions["new_tokens"], **options)
        rows = [row[batch["input_ids"].shape[1] :].tolist() for row in out]
        return [row[: row.index(2) + 1] if 2 in row else row for row in rows]

    def check_generation(self) -> dict:
        prompts = self.questions["prompts"]

        def greedy(**options: object) -> list[list[int]]:
            return self.new_tokens(prompts, do_sample=False, **options)

        return {
            "greedy": [self.new_tokens([prompt], do_sample=False)[0] for prompt in prompts],
            "greedy_padded_batch": greedy(),
            "greedy_without_cache": greedy(use_cache=False),
            "greedy_static_cache": greedy(cache_implementation="static"),
        }

    def check_tokenizer(self) -> dict:
        tokenizer, chat, texts = self.tokenizer, self.questions["chat"], self.questions["texts"]
        own = ("unk_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
        return {
            "texts_off": [text for text, ids in texts if tokenizer(text)["input_ids"] != ids],
            "decoded_off": [text for text, ids in texts if tokenizer.decode(ids[1:]) != text],
            "chat": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            "conversations_off": [
                asked for asked in self.questions["conversations"] if self.chat_ids(asked[0]) != asked[1:]
            ],
            "chat_without_prompt": tokenizer.apply_chat_template(chat, tokenize=False),
            "special_ids": [getattr(tokenizer, name) for name in own],
        }

    def chat_ids(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and 1 for each that is trained."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        made = self.tokenizer.apply_chat_template(messages, **options)
        return made["input_ids"], made["assistant_masks"]

    def check_saving(self, copy: str) -> float:
        """What a user's own save_pretrained writes is again a folder that loads, code included."""
        self.model.save_pretrained(copy)
        loaded = AutoModelForCausalLM.from_pretrained(copy, **LOAD).eval()
        return off(loaded(self.questions["ids"]).logits, self.questions["logits"])


_, _, answers_path, *asked = sys.argv
answers = {}
with torch.no_grad():
    for path, questions in zip(asked[::2], asked[1::2], strict=True):
        answers[path] = Folder(path, questions).answers(f"{answers_path}.{len(answers)}")
for each in answers.values():
    each["transformers"] = transformers.__version__
    each["ours"] = [name for name in sys.modules if name.split(".")[0] == "laneformer"]
with open(answers_path, "w") as file:
    json.dump(answers, file)
