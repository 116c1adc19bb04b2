from verl.agentopsd.rollout.seeds import episode_seed, turn_seed


def test_same_input_same_seed_in_every_process():
    # the first 31 bits that `b2sum --length=32` gives for the text 1/2/3/train/g/4
    assert episode_seed(1, 2, 3, "train/g", 4) == 0x79647325
    assert turn_seed(5, 6) == turn_seed(5, 6)


def test_everything_that_identifies_an_episode_changes_its_seed():
    base = (1, 2, 3, "train/g", 4)
    others = [(0, 2, 3, "train/g", 4), (1, 0, 3, "train/g", 4), (1, 2, 0, "train/g", 4), (1, 2, 3, "train/h", 4)]
    others += [(1, 2, 3, "train/g", session) for session in range(4)]
    seeds = [episode_seed(*parts) for parts in [base, *others]]
    assert len(set(seeds)) == len(seeds)
    assert len({turn_seed(seeds[0], turn) for turn in range(50)}) == 50


def test_seeds_fit_every_generator():
    assert all(0 <= episode_seed(0, 0, 0, str(i), 0) < 2**31 for i in range(1000))
