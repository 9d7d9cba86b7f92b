"""Prompt files and named sets."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from toma_lab.prompts import load_prompts, paper_protocol


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


class TestFiles:
    def test_lines(self, tmp_path):
        source = write(tmp_path / "prompts.txt", "\ufeffa red apple\n\n  ein Bär, grün \na red apple\n")
        assert load_prompts(source) == ("a red apple", "ein Bär, grün")

    def test_a_column_of_a_table(self, tmp_path):
        source = write(tmp_path / "gemrec.csv", 'id,Prompt,seed\n1,"a castle, oil on canvas",3\n2,,4\n3,a dog,5\n')
        assert load_prompts(source) == ("a castle, oil on canvas", "a dog")

    def test_a_template_makes_prompts_of_class_names(self, tmp_path):
        source = write(tmp_path / "classes.txt", "tench\ngoldfish\n")
        assert load_prompts(source, "a photo of a {}") == ("a photo of a tench", "a photo of a goldfish")

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("empty.txt", "\n", "the file is empty"),
            ("other.csv", "id,text\n1,a dog\n", "no column 'prompt'. Its columns: id, text"),
            ("empty.csv", "prompt\n", "is empty"),
        ],
    )
    def test_mistakes_are_named(self, name, text, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            load_prompts(write(tmp_path / name, text))

    @pytest.mark.parametrize(
        ("name", "written"), [("latin.txt", "café".encode("latin-1")), ("long.csv", b"prompt\n" + b"x" * 140_000)]
    )
    def test_what_cannot_be_read_is_named(self, name, written, tmp_path):
        (tmp_path / name).write_bytes(written)
        with pytest.raises(ValueError, match=rf"{name}': the file cannot be read as UTF-8 text or CSV"):
            load_prompts(str(tmp_path / name))

    def test_no_file(self):
        with pytest.raises(ValueError, match="there is no such file"):
            load_prompts("nowhere.txt")

    def test_a_template_needs_a_place(self, tmp_path):
        with pytest.raises(ValueError, match=r"has no \{\}, which is replaced by the prompt"):
            load_prompts(write(tmp_path / "prompts.txt", "a dog\n"), "a photo")


class TestImagenet:
    def test_without_torchvision_a_file_is_asked_for(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchvision.models", None)
        with pytest.raises(ValueError, match=r"--prompts FILE --template 'a photo of a \{\}'"):
            load_prompts("imagenet")

    def test_with_torchvision(self, monkeypatch):
        """The form in which torchvision 0.13 and later has them."""
        models = ModuleType("torchvision.models")
        weights = SimpleNamespace(DEFAULT=SimpleNamespace(meta={"categories": ["tench", "goldfish"]}))
        models.AlexNet_Weights = weights
        monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
        monkeypatch.setitem(sys.modules, "torchvision.models", models)
        assert load_prompts("imagenet") == ("a photo of a tench", "a photo of a goldfish")


class TestProtocol:
    def test_every_class_thrice(self):
        classes = tuple(f"a photo of a {index}" for index in range(1000))
        prompts, seeds = paper_protocol("imagenet", classes)
        assert len(prompts) * len(seeds) == 3000

    def test_fifty_of_a_list_thrice(self):
        prompts, seeds = paper_protocol("gemrec.csv", tuple(map(str, range(90))))
        assert prompts == tuple(map(str, range(50)))
        assert seeds == (0, 1, 2)

    def test_fewer_are_refused(self):
        with pytest.raises(ValueError, match=r"needs 50 prompts, 'few\.txt' has 3"):
            paper_protocol("few.txt", ("a", "b", "c"))
