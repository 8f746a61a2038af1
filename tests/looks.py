"""What a page looks like, measured: contrast of its text, and what does not fit its width."""

from __future__ import annotations

from typing import Any

_CONTRASTS = """() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const luminance = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        const [r, g, b, alpha] = context.getImageData(0, 0, 1, 1).data;
        if (alpha < 255) return null;
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    };
    const ground = (node) => luminance(getComputedStyle(node).backgroundColor) ?? ground(node.parentElement);
    const written = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const nodes = [...document.querySelectorAll(".dglab *")];
    return nodes.filter((node) => written(node) && !node.closest("svg, :disabled")).map((node) => {
        const [low, high] = [luminance(getComputedStyle(node).color), ground(node)].sort((a, b) => a - b);
        const where = `${node.className} ${node.dataset.state ?? ""} ${node.textContent.slice(0, 20)}`;
        return [(high + 0.05) / (low + 0.05), where];
    });
}"""

# What is only for a screen reader is cut off at a pixel: its sentence is wider than that, and widens no page.
_STICKING_OUT = """(width) => [document.documentElement, ...document.querySelectorAll(".dglab *")]
    .filter((node) => !node.parentElement?.closest(".dg-cell, .dg-hidden"))
    .filter((node) => node.getBoundingClientRect().right > width + 1
        || (node.scrollWidth > width && !node.matches(".dg-hidden")))
    .map((node) => `${node.tagName} ${node.getAttribute("class")}`)"""


def contrasts(page: Any) -> list[tuple[float, str]]:
    """The WCAG contrast of every piece of text in the lab's explorables, and where it stands. Drawings are left out."""
    return [(contrast, where) for contrast, where in page.evaluate(_CONTRASTS)]


def sticking_out(page: Any, width: int) -> list[str]:
    """Elements that reach beyond a page of this width; a page that scrolls sideways is the first of them."""
    return page.evaluate(_STICKING_OUT, width)
