-- Put before scripts that take over what a dead engine ran: which of its requests may have ended it.
-- An engine runs many requests at once and dies of one. Whoever had a token since it was begun there (`progress` is that
-- attempt) was a bystander and burns no attempt; the others are suspects, do, and run alone until they have one too
-- (`alone` 1). Who was there at two deaths, or dies alone, stays alone until its end (2): a token may be fatal as well.

-- `r`: state, attempt, progress, alone, crashes of a request whose engine has died, or that was given back.
-- Returns the new `alone` ('' if it may run in company), whether the attempt is burnt, and the new `crashes`.
local function suspicion(r)
  local alone, crashes = r[4] or '', tonumber(r[5] or 0)
  if r[1] ~= 'running' then return alone, false, crashes end
  if alone ~= '' then return alone, true, crashes end
  if r[3] ~= r[2] then return '1', true, crashes end
  crashes = crashes + 1
  return crashes > 1 and '2' or '', false, crashes
end
