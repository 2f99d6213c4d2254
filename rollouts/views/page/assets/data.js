// The data of the page: what payload.py packed, unpacked when it is needed.
"use strict";

async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function embedded(id) {
  const element = document.getElementById(id);
  return element && Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
}

const asText = (bytes) => new TextDecoder().decode(bytes);

/** One run or evaluation. `read` returns the packed bytes of a part, by its name. */
class Run {
  constructor(head, number, read) {
    Object.assign(this, head);
    this.number = number;
    this.read = read;
    this.cache = new Map();
    this.count = this.groups.number.length;
    this.position = new Map(this.groups.number.map((group, position) => [group, position]));
    this.last = this.samples.index.length;
  }

  static async open(number, read) {
    const packed = await read(`head-${number}`);
    return new Run(JSON.parse(asText(await unpacked(packed))), number, read);
  }

  /** The rows of a group in the columns of `samples`. */
  rows(position) {
    const first = this.groups.first[position];
    const end = position + 1 < this.count ? this.groups.first[position + 1] : this.last;
    return Array.from({ length: end - first }, (_, offset) => first + offset);
  }

  /** Identifies the rollout of a row in its group, or its conversation with a seat; its branches have the same. */
  rollout(row) {
    return this.samples.rollout[row] ?? `row ${row}`;
  }

  /** The rewards of the rollouts of a group: of each the mean of its branches, null if one has none. */
  rewards(position, rows = this.rows(position)) {
    const rollouts = new Map();
    for (const row of rows) {
      const branches = rollouts.get(this.rollout(row)) || [];
      rollouts.set(this.rollout(row), [...branches, this.samples.reward[row]]);
    }
    return [...rollouts.values()].map((rewards) => (rewards.every(isNumber) ? mean(rewards) : null));
  }

  /** The numbers of `rewards` for each seat, whose rewards are compared with each other only. */
  bySeat(position) {
    const seats = new Map();
    for (const row of this.rows(position)) {
      const seat = (this.samples.seat[row] || "").split(" ")[0];
      seats.set(seat, [...(seats.get(seat) || []), row]);
    }
    return [...seats.values()].map((rows) => this.rewards(position, rows).filter(isNumber)).filter((one) => one.length);
  }

  /** The spans of all samples, unpacked at the first call. */
  async times() {
    if (!this.spans) this.spans = JSON.parse(asText(await unpacked(await this.read(`times-${this.number}`))));
    return this.spans;
  }

  name(kind, number) {
    return this.names[kind][number];
  }

  /** The samples of a group with their tokens; null if they are on another page. */
  async members(position) {
    const chunk = this.chunks.find(([first, groups]) => position >= first && position < first + groups);
    const first = chunk[0];
    if (!this.cache.has(first)) {
      const packed = await this.read(`chunk-${this.number}-${first}`);
      if (!packed) return null;
      this.cache.set(first, this.unpackedSamples(await unpacked(packed)));
    }
    const samples = this.cache.get(first);
    const offset = this.groups.first[first];
    return this.rows(position).map((row) => samples[row - offset]);
  }

  unpackedSamples(bytes) {
    const view = new DataView(bytes.buffer);
    const length = view.getUint32(0, true);
    const { samples, wide, images } = JSON.parse(asText(bytes.subarray(4, 4 + length)));
    const total = samples.reduce((sum, sample) => sum + sample.n, 0);
    const Column = wide ? Uint32Array : Uint16Array;
    const numbers = new Column(bytes.buffer, 4 + length, total);
    const planes = bytes.subarray(4 + length + total * Column.BYTES_PER_ELEMENT);
    const trained = planes.length / 2;
    const single = new DataView(new ArrayBuffer(4));
    const logprob = (place) => {
      single.setUint16(0, (planes[place] << 8) | planes[trained + place]);
      return single.getFloat32(0);
    };
    let token = 0;
    let next = 0;
    return samples.map((sample) => {
      const unpackedSample = new Tokens(sample, numbers.subarray(token, token + sample.n), this.vocabulary, images || []);
      token += sample.n;
      if (sample.logprobs !== false) {
        unpackedSample.mask.forEach((sampled, place) => {
          if (sampled) unpackedSample.logprobs[place] = logprob(next++);
        });
      }
      return unpackedSample;
    });
  }
}

/** The tokens of one sample, with a value of each layer for each of them. */
class Tokens {
  constructor(described, numbers, vocabulary, images) {
    Object.assign(this, { completions: described.completions, steps: described.steps, metrics: described.metrics });
    this.length = described.n;
    this.ids = Array.from(numbers, (number) => vocabulary.ids[number]);
    this.texts = Array.from(numbers, (number) => vocabulary.texts[number]);
    for (const [place, text] of described.texts || []) this.texts[place] = text;
    this.mask = new Uint8Array(described.n);
    for (let run = 0; run < described.mask.length; run += 2) this.mask.fill(1, described.mask[run], described.mask[run + 1]);
    this.logprobs = new Float32Array(described.n).fill(NaN);
    this.versions = new Array(described.n).fill(null);
    for (const [version, start, stop] of described.versions) this.versions.fill(version, start, stop);
    this.images = new Map((described.images || []).map(([image, start, stop]) => [start, { url: images[image], start, stop }]));
    const whole = this.texts.join("");
    this.messages = described.messages.map(([role, text, calls]) => ({
      role,
      text: typeof text === "string" ? text : whole.slice(text[0], text[0] + text[1]),
      calls: calls || [],
    }));
  }

  /** Replies and the context between them, as [start, stop, number of the completion or -1]. */
  get pieces() {
    const pieces = [];
    let position = 0;
    this.completions.forEach(([start, stop], number) => {
      if (start > position) pieces.push([position, start, -1]);
      pieces.push([start, stop, number]);
      position = stop;
    });
    if (this.length > position) pieces.push([position, this.length, -1]);
    return pieces;
  }

  /** The number of tokens that another sample begins with, too. */
  shared(other) {
    const end = Math.min(this.length, other.length);
    let place = 0;
    while (place < end && this.ids[place] === other.ids[place]) place++;
    return place;
  }
}
