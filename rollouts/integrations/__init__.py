"""Doors to trainers: each folder or file speaks one trainer's language, and imports it only when it is used."""
