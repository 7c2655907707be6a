"""The controls of `measure.control`: each damages a training on purpose, to test that a check of learning detects it.
`worker/measure/controls.py` applies them."""

CONTROLS = {
    "learning_rate_0": "nothing is learned",
    "reversed_gradient": "the gradient has the opposite sign",
    "random_labels": "labels are random tokens",
    "lora_scale_x0.5": "adapters count half",
    "lora_scale_x1.5": "adapters count one and a half times",
    "lora_scale_x1.05": "adapters count 5 % too much",
    "projection_frozen": "v_proj is never trained",
    "layer_frozen": "one layer is never trained",
    "lora_a_frozen": "lora_A is never trained",
    "gradient_entries_lost": "1 % of the gradient entries of one layer are zero",
    "layer_gradient_reversed": "the gradient of one layer has the opposite sign",
    "learning_rate_x1.5": "the learning rate is one and a half times too high",
    "learning_rate_x1.1": "the learning rate is 10 % too high",
    "gradient_noise": "noise as large as the gradient is added to it",
    "frozen_weights_noise": "5 % noise on the frozen weights",
    "positions_zero": "every token has position 0",
    "attention_off": "attention returns zeros",
    "loss_over_padding": "padding carries loss",
    "prompts_not_masked": "prompts carry loss",
    "packed_samples_see_each_other": "samples of a packed row attend to each other",
    "accumulation_divisor": "each micro-batch counts the same, however many label tokens it has",
}
DAMAGED, RECORDED = "a control", "recorded for a parity check"  # the warnings of these runs start so
GRADED = tuple(CONTROLS)[3:]  # those that `ftbench parity --controls all` runs
OF_ADAPTERS = (*(name for name in GRADED if name.startswith("lora_")), "frozen_weights_noise")
