// The queue's protocol in JavaScript: docs/protocol.md, with a Redis library and nothing else.

import { randomUUID } from 'node:crypto';
import { Redis } from 'ioredis';

const WATCHDOG_MS = 5000;
const ENDED = new Set(['completed', 'cancelled', 'failed', 'expired', 'rejected']);

export class RequestLost extends Error {}

export class Queue {
  constructor(url = 'redis://127.0.0.1:6379/0', { prefix = 'pm', queue = 'default' } = {}) {
    this.tag = `${prefix}:{${queue}.0}`;
    this.commands = new Redis(url, { maxRetriesPerRequest: 3 });
    this.listener = new Redis(url);
    this.wakeups = new Map();
    this.listener.on('message', (channel, payload) => {
      const space = payload.indexOf(' ');
      const message = { seq: Number(payload.slice(0, space)), data: payload.slice(space + 1) };
      this.wakeups.get(channel)?.forEach((wake) => wake(message));
    });
    // What was published while the connection was away was missed: everybody looks into the stream.
    this.listener.on('ready', () => this.wakeups.forEach((followers) => followers.forEach((wake) => wake(null))));
    for (const connection of [this.commands, this.listener]) connection.on('error', () => {});
  }

  // Sends a request and returns its id. One that was not answered may be sent again under the same id: at worst the
  // second entry is a dead letter, and the events are those of the first.
  async submit(body, { id = `js-${randomUUID()}`, priority = 1 } = {}) {
    const words = ['v', '1', 'id', id, 'body', JSON.stringify(body)];
    for (let attempt = 1; ; attempt += 1) {
      try {
        await this.commands.xadd(`${this.tag}:in:${priority}`, '*', ...words);
        return id;
      } catch (error) {
        if (attempt === 5 || error.name === 'ReplyError') throw error;
      }
    }
  }

  async cancel(id) {
    const record = `${this.tag}:req:${id}`;
    await this.commands.multi().hset(record, 'cancel', '1').call('EXPIRE', record, '3600', 'NX').exec();
  }

  // Every event once, in order, up to and with `done`.
  async *events(id, after = 0) {
    const channel = `${this.tag}:ch:${id}`;
    const live = [];
    let last = after;
    let behind = true;
    let known = false;
    let resume = () => {};
    const wake = (message) => {
      if (message === null) behind = true;
      else live.push(message);
      resume();
    };
    const followers = this.wakeups.get(channel) ?? new Set();
    this.wakeups.set(channel, followers.add(wake));
    try {
      await this.listener.subscribe(channel);
      for (;;) {
        if (behind) {
          behind = false;
          const stored = await this.commands.xrange(`${this.tag}:ev:${id}`, `(${last}-0`, '+');
          for (const [entry, fields] of stored) {
            last += 1;
            if (entry !== `${last}-0`) throw new RequestLost(`event ${last} of ${id} is gone`);
            const event = JSON.parse(fields[1]);
            yield event;
            if (event.type === 'done') return;
          }
          if (stored.length === 0) {
            const [state, seq] = await this.commands.hmget(`${this.tag}:req:${id}`, 'state', 'seq');
            if (state === null && (known || last > 0)) throw new RequestLost(`the record of ${id} is gone`);
            if (state !== null && ENDED.has(state)) {
              if (Number(seq) <= last) throw new RequestLost(`the last event of ${id} has expired`);
              behind = true; // it ended between the two commands
              continue;
            }
            known ||= state !== null;
          }
        }
        while (live.length > 0 && !behind) {
          const message = live.shift();
          if (message.seq > last + 1) behind = true;
          if (message.seq !== last + 1) continue;
          last = message.seq;
          const event = JSON.parse(message.data);
          yield event;
          if (event.type === 'done') return;
        }
        if (behind || live.length > 0) continue;
        behind = await new Promise((resolve) => {
          const timer = setTimeout(() => resolve(true), WATCHDOG_MS);
          resume = () => {
            clearTimeout(timer);
            resolve(behind);
          };
        });
      }
    } finally {
      followers.delete(wake);
      if (followers.size === 0) {
        this.wakeups.delete(channel);
        await this.listener.unsubscribe(channel);
      }
    }
  }

  close() {
    this.commands.disconnect();
    this.listener.disconnect();
  }
}
