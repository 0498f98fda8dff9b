"""Which of our parameters is which tensor of another program, and how their layouts differ.

``rules`` says what a mapping is, ``layouts`` has the changes of layout, ``megatron`` the table.
"""
