-- Copies an entry's fields, cut to 64 KiB each, to the dead letters.
local function keep_dead_letter(letters, statistics, stream, entry, reason, problem, attempts)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  if not found then return end
  local letter = {'reason', reason, 'error', problem, 'attempts', attempts, 'stream', stream, 'entry', entry}
  for i = 1, math.min(#found[2], 128) do letter[#letter + 1] = string.sub(found[2][i], 1, 65536) end
  redis.call('XADD', letters, 'MAXLEN', '~', 10000, '*', unpack(letter))
  redis.call('HINCRBY', statistics, 'dead_letters', 1)
end
